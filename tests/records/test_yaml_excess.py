"""YAMLs whose aliases stand for more values than any memory holds, or that are nested without end."""

import time

import pytest

from titanlab.errors import ConfigError
from titanlab.records.config_file import read_config
from titanlab.records.yaml_excess import excess


def laughs(levels):
    lines = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "much"),
    [
        ("", False),
        ("a: 1 & 2 * 3", False),
        ("a: &a [1, 2]\nb: *a\nc: *a", False),
        (laughs(4), False),
        (laughs(9), True),
        (laughs(300), True),
        ("a: &a [*a]", True),
        ("a: &a {b: {c: [*a]}}", True),
        (f"a: &a 1\nb: {'[' * 150}*a{']' * 150}", False),
        ("[" * 200_000, True),
        ("{a: " * 20_000, True),
        ("- " * 20_000 + "a", True),
        ("".join(" " * n + "a:\n" for n in range(400)), True),
        (f"a: [{'[], ' * 500}]", False),
    ],
)
def test_aliases_are_counted_and_not_expanded(text, much):
    start = time.process_time()
    assert (excess(text) is not None) is much
    assert time.process_time() - start < 5


def test_a_config_of_a_run_that_expands_is_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text(laughs(9))
    with pytest.raises(ConfigError, match=r"its config\.yaml cannot be read \(its aliases stand for too many values\)"):
        read_config(tmp_path / "config.yaml")

"""config.yaml: what is written is what every reader gets."""

import re
import time

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given
from omegaconf import OmegaConf

from titanlab.errors import ConfigError
from titanlab.records import config_text, read_config, yaml_excess

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab1e-.+_:#'\" \n\r\t\x00\x85\u2028\u2029\ufeff$é", max_size=8)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner), max_leaves=8
)


@given(st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=4))
def test_values_survive(tmp_path_factory, config):
    assert yaml.safe_load(config_text(config)) == config
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config_text(config), encoding="utf-8")
    assert read_config(path) == config


@pytest.mark.parametrize("text", ["1e-5", "1E5", "12", "0.5", ".5", "1_000", "inf", "-nan", "true", "null", "0x1f", ""])
def test_text_that_looks_like_something_else_stays_text_for_omegaconf_too(text):
    assert OmegaConf.create(config_text({"a": text}))["a"] == text


def test_a_section_that_was_written_before_is_not_taken_for_one_that_only_equals_it():
    for value, text in ((1, "1"), (True, "true"), (1.0, "1.0"), (1, "1"), ("1", "'1'")):
        assert config_text({"a": {"b": value}, "c": value}) == f"a:\n  b: {text}\nc: {text}\n"
    assert config_text({}) == "{}\n"
    changing = {"b": [1]}
    assert config_text({"a": changing}) == "a:\n  b:\n  - 1\n"
    changing["b"].append(2)
    assert config_text({"a": changing}) == "a:\n  b:\n  - 1\n  - 2\n"


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
        (laughs(2), False),
        (laughs(9), True),
        (laughs(300), True),
        ("a: &a {b: 1}\nc: [" + "{<<: *a, d: 2}, " * 100 + "]", False),
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
    assert (yaml_excess(text) is not None) is much
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb:\n  c: 2\n  d: [3, x]\n",
        "b:\n- 1\n- 2\na:\n- 1\n",
        "a: &x {b: 1}\nc: *x\n",
        "a: 'one\n\n  two'\nb: 1\n",
        "a: [1,\n  2]\nb: 1\n",
        "a: [1,\n2]\nb: 1\n",
        'a: "x: y"\n# a comment\nb: 1\n',
        "a: |\n  one\n  two: 2\nb: 1\n",
        "a: 1\na: 2\nyes: 3\nnull: 4\n",
        "---\na: 1\n",
        "a:\n  b: 1\n\n  c: 2\nd: x\n  y\n",
        "a: 2026-11-24\nb: 1\n",
    ],
)
def test_a_file_that_is_read_by_sections_has_the_values_of_the_whole(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    first = read_config(path)
    assert first == yaml.safe_load(text)
    # Nobody shares what another may change.
    first[next(iter(first))] = None
    for value in first.values():
        if isinstance(value, dict | list):
            value.clear()
    assert read_config(path) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "has no config.yaml"),
        (b"\xff\xfe\xff", "its config.yaml cannot be read ('utf-8' codec"),
        (b"- 1", "its config.yaml holds no mapping"),
        ("a: [1\nb: 2", "its config.yaml cannot be read (while parsing a flow sequence"),
        ("a: *b", "its config.yaml cannot be read (found undefined alias"),
        ("[" * 20_000, "its config.yaml cannot be read (it is nested too deeply)"),
        (laughs(9), "its config.yaml cannot be read (it has more than 30 aliases inside of anchors)"),
        ("a: &a [*a]", "its config.yaml cannot be read (an alias in it stands for itself)"),
        ("a: 2026-13-45", "its config.yaml cannot be read (month must be in 1..12"),
        ("a: 1" + "0" * 10_000, "its config.yaml cannot be read (Exceeds the limit"),
    ],
    ids=["none", "bytes", "list", "broken", "undefined", "deep", "aliases", "ring", "date", "digits"],
)
def test_a_file_that_holds_no_config_is_an_error_of_one_line(tmp_path, content, rule):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=re.escape(rule)) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)

"""Paths and sizes of files among the arguments of verbs."""

from pathlib import Path

import pytest

from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.errors import ConfigError
from titanlab.system import user_path


@pytest.mark.parametrize("kind", [Path, user_path])
@pytest.mark.parametrize("make", [lambda: Arguments("verb", "What."), lambda: Arguments("verb", "What.", "use")])
@pytest.mark.parametrize("text", ["", " "])
def test_a_path_without_a_name_is_not_the_current_folder(kind, make, text):
    made = make()
    made.add_argument("--into", type=kind)
    with pytest.raises(ConfigError) as raised:
        made.parse_known_args([f"--into={text}"])
    assert str(raised.value) == f"--into={text}: names no file or folder; see `titanlab verb --help`".replace(
        "= :", "=:"
    )
    assert made.parse_known_args(["--into", "."])[0].into == Path()


SIZES = {
    "1": 1,
    "5GB": 5_000_000_000,
    "500 MiB": 500 << 20,
    " 5 b ": 5,
    "1.5kb": 1500,
    "1 tib": 1 << 40,
    "1e3KB": 10**6,
}
NO_SIZES = [
    "",
    "0",
    "0.5",
    "-1",
    "GB",
    "5XB",
    "5 GB s",
    "1.",
    ".5",
    "1e-3",
    "1e400",
    str(2**63),
    "1 000",
    "0x10",
    "nan",
]


def test_sizes_of_files():
    assert {text: bytes_of(text, "--size") for text in SIZES} == SIZES
    for text in NO_SIZES:
        with pytest.raises(ConfigError) as raised:
            bytes_of(text, "--size")
        assert str(raised.value) == f"--size={text}: is no size of a file; try 5GB"

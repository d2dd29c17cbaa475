"""Arguments of verbs that take no recipe: any order, mistakes in one line, sizes of files."""

from pathlib import Path

import pytest

from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.errors import ConfigError
from titanlab.system import user_path


@pytest.fixture
def parser():
    made = Arguments("verb", "What it does.")
    made.add_argument("run")
    made.add_argument("more", nargs="*")
    made.add_argument("--number", "-n", type=int)
    made.add_argument("--rate", type=float)
    made.add_argument("--quiet", action="store_true")
    return made


def test_options_may_stand_anywhere(parser):
    read = parser.parse_args(["-n", "3", "a", "b", "--rate=0.5", "c", "--quiet"])
    assert (read.run, read.more, read.number, read.rate, read.quiet) == ("a", ["b", "c"], 3, 0.5, True)
    read = parser.parse_args(["a"])
    assert (read.run, read.more, read.number, read.rate, read.quiet) == ("a", [], None, None, False)


def test_a_verb_that_takes_a_recipe_leaves_the_rest_to_hydra():
    made = Arguments("verb", "What it does.", usage="titanlab verb")
    made.add_argument("--quiet", action="store_true")
    read = made.parse_args(["+recipe=toy", "--cfg", "job", "--quiet", "a=-1"])
    assert (read.quiet, read.rest) == (True, ["+recipe=toy", "--cfg", "job", "a=-1"])


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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["a", "-n", "x\ny"], "--number/-n=x\\ny: must be a whole number"),
        (["a", "-n", "1.5"], "--number/-n=1.5: must be a whole number"),
        (["a", "-n"], "arguments=a -n: argument --number/-n: expected one argument"),
        # An abbreviation would change its meaning with a new option.
        (["a", "--numb", "3"], "arguments=a --numb 3: unrecognized arguments: --numb 3"),
        (["a", "--quiet=1"], "arguments=a --quiet=1: argument --quiet: ignored explicit argument '1'"),
        (["a", "-n", str(-(2**63))], f"--number={-(2**63)}: must be at least -9,223,372,036,854,775,807"),
    ],
)
def test_mistakes_are_one_line(parser, arguments, error):
    with pytest.raises(ConfigError) as raised:
        parser.parse_args(arguments)
    assert str(raised.value) == f"{error}; see `titanlab verb --help`"


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

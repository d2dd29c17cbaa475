"""Every command that a page, a comment or a help shows runs as it is written, in the page's order.

Recipes are composed and held to every rule, as before a start; of long sweeps the first point is planned (tests/sweep
plans them whole). Nothing is started: tests/docs/test_executed.py trains.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import (
    CONFIGS,
    DECISIONS,
    PAGES,
    ROOT,
    TITANLAB,
    VERBS,
    Command,
    blocks,
    commands,
    commands_of_comments,
    commands_of_help,
    read,
)
from titanlab.cli import main

# In a sentence: a verb, perhaps with a flag, is spoken of and not typed.
NAMED = re.compile(r"titanlab [a-z-]+( --?[\w-]+( titanlab)?| launch=slurm| init_from=…)?( …)?")
HASH = re.compile(r"-[0-9a-f]{8}\b")
# Commands that need no file of the reader's: each is run once, however many pages have it.
ALIKE = re.compile(r"titanlab (train|sweep) (?!.*(--config-dir|--dry-run|data|file=|init_from=))")
# Their commands are typed in `make test` too, those of the other pages in the slower layer.
READ_FIRST = ("README.md", "docs/tutorial.md", "docs/configuration.md")
# What no reader in an empty folder can type, and why. The list is short, and a line that is on no page is an error.
ELSEWHERE = {
    # tests/cli, with the files and runs that they need.
    ("docs/sweeps.md", "titanlab sweep +sweeps=mine --dry-run"),
    ("docs/planner.md", "titanlab plan --calibrate cpu_calibration"),
    ("docs/planner.md", "titanlab plan --measure"),
    ("docs/planner.md", "titanlab plan --measure launch=slurm cluster=h100 world=16 launch.minutes=10"),
    ("docs/checkpoints.md", "titanlab import FOLDER --model llama3_1_8b"),
    ("docs/housekeeping.md", "titanlab repro RUN --into FOLDER"),
    # tests/checkpoint, tests/weights and tests/prove have such runs.
    ("docs/checkpoints.md", "titanlab resume RUN --step 8"),
    ("docs/checkpoints.md", "titanlab export RUN --into FOLDER --format dcp"),
    ("docs/proofs.md", "titanlab parity alone two-ranks"),
    # Options of packages that the pages show.
    ("docs/configuration.md", "titanlab train optimizer=cautious"),
    ("docs/models-of-your-own.md", "titanlab train model=gpt_tiny"),
    (
        "docs/models-of-your-own.md",
        "titanlab train model=gpt_tiny data=synthetic training.steps=3 training.seq_len=64",
    ),
}


def with_commands(pages: list[str]) -> list[str]:
    return [page for page in pages if commands(page)]


# tests/extending/test_extending.py runs the commands of the page whose packages have to be installed.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in READ_FIRST else [pytest.mark.full])
        for page in with_commands([page for page in [*PAGES, *DECISIONS] if page != "docs/extending.md"])
    ],
)
def test_commands_of_a_page_run(reader, page):
    write_files(page)
    found = [each for each in commands(page) if (page, each.text) not in ELSEWHERE]
    faults = [fault for command in found for fault in faults_of(reader, command)]
    assert not faults, "\n".join(f"{page}:{fault}" for fault in faults)


def test_what_is_left_out_is_on_the_pages():
    shown = {(page, command.text) for page in PAGES for command in commands(page)}
    assert shown >= ELSEWHERE


@pytest.mark.full
def test_commands_in_comments_of_configs_run(reader):
    faults = [
        f"{config}:{fault}"
        for config in CONFIGS
        for command in commands_of_comments(config)
        for fault in faults_of(reader, command)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.full
def test_commands_in_the_help_run(reader):
    found = {verb: commands_of_help(help_of(verb)) for verb in ("", "train", "sweep")}
    assert all(found.values())
    faults = [
        f"titanlab {verb} --help:{fault}"
        for verb, of_verb in found.items()
        for command in of_verb
        for fault in faults_of(reader, command)
    ]
    assert not faults, "\n".join(faults)


def test_commands_that_the_makefile_advises_run(reader):
    lines = re.findall(r'echo "  (titanlab [^"#]*)', read("Makefile"))
    found = [Command(0, text.strip()) for line in lines for text in line.split(";")]
    assert len(found) > 3
    faults = [fault for command in found for fault in faults_of(reader, command)]
    assert not faults, "\n".join(faults)


def faults_of(reader, command: Command) -> list[str]:
    """What is wrong with a command; nothing where all is well."""
    if not re.search(r"(^|\$\(|-m |^\w+=\S* )titanlab\b", command.text):
        wrong = wrong_elsewhere(command.text)
    elif NAMED.fullmatch(command.text):
        wrong = wrong_by_name(command.text)
    else:
        wrong = wrong_as_typed(reader, command)
    return [f"{command.line}: {command.text}\n    {wrong}"] if wrong else []


typed_before: set[str] = set()


def wrong_as_typed(reader, command: Command) -> str:
    shown = command.shown
    plain = re.split(r" {2,}#", command.text)[0]
    if plain in typed_before and shown is None:
        return ""
    if ALIKE.match(plain):
        typed_before.add(plain)
    said = reader.types(command.text)
    if shown is not None and shown.startswith("error: "):
        return "" if (said.code, said.err) == (2, shown) else f"exit code {said.code}: {said.err or said.out}"
    if said.code:
        return f"exit code {said.code}: {said.err or said.out}"
    for line in said.out.splitlines():
        # What a command advises, runs too.
        if re.match(rf"{TITANLAB} \S", line) and (advised := reader.types(line)).code:
            return f"prints {line}\n    exit code {advised.code}: {advised.err}"
    if shown is None or reader.stood_in:
        return ""
    return "" if HASH.sub("", said.out).split() == HASH.sub("", shown).split() else f"prints\n{said.out}"


@functools.cache
def help_of(verb: str) -> str:
    """What `titanlab VERB --help` prints; of an empty verb, `titanlab --help`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*verb.split(), "--help"])
    return printed.getvalue()


def wrong_by_name(text: str) -> str:
    """Check that a verb in the text exists and has the flag."""
    words = text.split()
    verb = "" if words[1].startswith("-") else words[1]
    if verb and verb not in VERBS.split():
        return "is not a verb"
    said = help_of(verb)
    flags = [word for word in words[1:] if word.startswith("-")]
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}\b", said)]
    return f"{' '.join(['titanlab', *verb.split()])} has no {missing[0]}" if missing else ""


def wrong_elsewhere(text: str) -> str:
    """Check that what other programs name of the repository is there."""
    words = shlex.split(text, comments=True)
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    scripts = [word for word in words if (ROOT / word).is_file() and not word.startswith("tests/")]
    for word in words:
        if re.match(r"(tests|benchmarks|notebooks|launch|docs|\.ci)/", word) and not list(ROOT.glob(word)):
            return f"there is no {word}"
        if words[0] == "make" and word != "make" and "=" not in word and word not in targets:
            return f"there is no target {word}"
        if variable := re.match(r"(TITANLAB_\w+|ARGS|TORCH_INSTALL_ARGS)=", word):
            used = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("notebooks/*.py"), ROOT / "Makefile"]
            if not any(variable[1] in path.read_text() for path in used):
                return f"nothing reads {variable[1]}"
        if scripts and word.startswith("--") and not any(word in (ROOT / name).read_text() for name in scripts):
            return f"{scripts[0]} has no {word}"
    return ""


def write_files(page: str) -> None:
    """Files that a page shows with their names, in the reader's home."""
    for block in blocks(page):
        if named := re.match(r"# ~/(\S+)\n", block.text):
            path = Path.home() / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)

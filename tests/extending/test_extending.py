"""Every section of docs/extending.md is a package: it is installed beside titanlab, and its commands do what it shows.

Its code is annotated, and mypy checks it against titanlab's contracts with the settings of titanlab.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import Block, Command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
FENCE = re.compile(r"(?:^<!-- (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """The files of a section, by path, and its commands."""

    files: dict[str, str]
    commands: list[Command]


def sections() -> dict[str, Section]:
    """The sections of the page that show files, by title."""
    result = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        blocks = [(file, Block(0, language, text)) for file, language, text in FENCE.findall(part)]
        files = {file: block.text for file, block in blocks if file}
        commands = [command for file, block in blocks if not file for command in block.commands()]
        if files:
            result[part.partition("\n")[0]] = Section(files, commands)
    return result


def install(files: dict[str, str], site: Path) -> None:
    """Put a package's files and its entry points where Python finds installed packages."""
    for name, text in files.items():
        path = (site / name).resolve()
        assert path.is_relative_to(site), name
        assert not name.startswith("titanlab/"), name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(site).parents[:-1]:
            (site / folder / "__init__.py").touch()
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def prints(said: str, shown: str) -> bool:
    """Whether each line that the page shows is printed; spaces do not count, and `…` is any text."""
    plain = " ".join(said.split())
    lines = [re.escape(" ".join(line.split())).replace("…", ".*?") for line in shown.splitlines()]
    return all(re.search(line, plain) for line in lines)


# Those that take longest run in `make test-full`.
SLOW = ("A precision", "An optimizer", "A model", "A launcher", "A tracker", "An activation checkpointing policy")


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.full] if title in SLOW else []) for title in sections()]
)
def test_a_section_is_a_package_that_works(tmp_path: Path, title: str) -> None:
    section = sections()[title]
    assert any(command.shown for command in section.commands)
    check_commands(section.commands, section.files, tmp_path)


# What is typed of an installed option: a value that breaks a rule of its own, and TAB.
TYPED = (
    Command(
        0,
        "titanlab train optimizer=lion optimizer.betas=[1.0]",
        "error: optimizer.betas=[1.0]: must be two numbers in [0, 1); try [0.9,0.99]",
    ),
    Command(0, 'COMP_LINE="titanlab train optimizer=l" titanlab completion query', "optimizer=lion"),
)


def test_the_page_begins_with_a_command_of_the_optimizer(tmp_path: Path) -> None:
    beginning = PAGE.read_text().partition("\n## ")[0]
    commands = [
        command for _, language, text in FENCE.findall(beginning) for command in Block(0, language, text).commands()
    ]
    assert [command.text for command in commands] == ["titanlab train optimizer=lion --cfg job --package optimizer"]
    check_commands([*commands, *TYPED], sections()["An optimizer"].files, tmp_path)


def check_commands(commands: Iterable[Command], files: dict[str, str], folder: Path) -> None:
    """Type commands in an empty folder, beside an installed package, and compare what they print with the page."""
    site, reader = (folder / "site").resolve(), folder / "elsewhere"
    reader.mkdir()
    install(files, site)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": programs, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=reader, env=environ, capture_output=True, text=True, check=False
        )
        printed = done.stdout + done.stderr
        refused = command.shown is not None and command.shown.startswith("error: ")
        assert done.returncode == (2 if refused else 0), printed
        assert prints(printed, command.shown or ""), printed


def test_what_is_not_printed_is_noticed() -> None:
    said = "  precision        rounded, 4 bits\n  folder  runs\n  done: all steps are done"
    assert prints(said, "  precision   rounded, … bits\n  …\n  done: all steps\n")
    assert not prints(said, "  precision   rounded, 8 bits")


def mypy_of(packages: Iterable[dict[str, str]], site: Path) -> str:
    """What mypy says about packages that are installed beside titanlab, with the settings of titanlab."""
    paths = []
    for files in packages:
        install(files, site)
        paths += [str(site / name) for name in files if name.endswith(".py")]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".cache" / "mypy")]
    # In a folder without titanlab's source, where mypy finds the installed one, whose `py.typed` says that it has types.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *paths],
        cwd=site,
        env={**os.environ, "MYPYPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.full
def test_every_section_is_typed(tmp_path: Path) -> None:
    said = mypy_of((section.files for section in sections().values()), tmp_path.resolve())
    assert said.startswith("Success: no issues found in "), said


@pytest.mark.full
@pytest.mark.parametrize("title", sections())
def test_a_package_of_the_page_is_installed_with_its_yaml(title: str, tmp_path: Path) -> None:
    """Three packages lost their YAML: setuptools leaves out what package-data does not name."""
    files = sections()[title].files
    wanted = {name for name in files if name.endswith(".yaml") and "/" in name}
    for name, text in files.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", *command, str(tmp_path / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wanted <= set(zipfile.ZipFile(wheel).namelist())

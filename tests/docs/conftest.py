"""A reader in a folder of the test's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import _logging_as_before  # noqa: F401
from tests.docs.given import write_all
from tests.docs.reader import Reader


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a reader has, to be copied."""
    folder = tmp_path_factory.mktemp("given") / "folder"
    folder.mkdir()
    write_all(folder)
    return folder


@pytest.fixture
def reader(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reader:
    """In a copy of that folder, with a home of their own."""
    folder = tmp_path / "reader"
    shutil.copytree(given, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    typing = Reader(folder, monkeypatch, capsys)
    if not (given / "runs" / "single").exists():
        # What pages take as done before: typed by the first reader, and there for all others.
        for command in (
            "titanlab train +recipe=quickstart",
            "titanlab import given/llama-2 --into llama_2/one --name hub",
        ):
            said = typing.types(command)
            assert said.code == 0, said.err
        (run,) = (folder / "runs" / "single").iterdir()
        shutil.copytree(run, run.with_name("small-3e65f73a"))
        for name in ("llama_2", "runs/single"):
            shutil.copytree(folder / name, given / name)
    return typing

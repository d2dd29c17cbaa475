"""A reader in a folder of the test's own."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_repository import ConfigRepository

from tests.cli.conftest import _logging_as_before, _quick_collection  # noqa: F401
from tests.docs.given import write_all
from tests.docs.reader import Reader
from titanlab.recipe.composition.recipes import register

# Content of files by the places where they are searched, and their names.
_READ: dict[tuple[str, ...], Any] = {}


# Not of the whole package: pytest would let it stay for files of other folders.
@pytest.fixture(scope="module", autouse=True)
def _yaml_read_once() -> Iterator[None]:
    """Hundreds of compositions read the same schemas and files: each is read once, and copied."""
    register()
    known = _READ
    load = ConfigRepository.load_config

    def loaded(self: ConfigRepository, config_path: str) -> Any:
        key = (*(source.path for source in self.sources), config_path)
        if key not in known:
            known[key] = load(self, config_path)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", loaded)
        for module in ("titanlab.cli.hydra_flags.answers", "titanlab.recipe.composition.loader"):
            patch.setattr(f"{module}.register", lambda: None)
        yield


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

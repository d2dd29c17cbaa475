"""Stands in for wandb's API: the runs of a project, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar


class Run(SimpleNamespace):
    """What titanlab asks of a `wandb.apis.public.Run`."""

    def scan_history(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class Api:
    """Its projects are the keys of `projects`.

    Attributes:
        projects: name → runs, as the attributes of `Run`.
        asked: the calls of `runs`.
    """

    projects: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = {}
    asked: ClassVar[list[tuple[str, Mapping[str, str]]]] = []

    def runs(self, path: str, filters: Mapping[str, str]) -> list[Run]:
        self.asked.append((path, filters))
        return [Run(**run) for run in self.projects[path] if filters.items() <= run.items()]


def write_module(folder: Path, projects: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """A module `wandb` for another process, whose Api has these projects."""
    folder.mkdir()
    (folder / "projects.json").write_text(json.dumps(projects))
    text = Path(__file__).read_text()
    read = 'Api.projects = json.loads(Path(__file__).with_name("projects.json").read_text())'
    (folder / "wandb.py").write_text(f"{text}\n\n{read}\n")
    return folder

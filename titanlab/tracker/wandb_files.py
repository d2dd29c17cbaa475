"""wandb's files in a run's folder: `wandb/[offline-]run-DATE-ID/run-ID.wandb`, one for each start."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from titanlab.tracker.record import REPLACED

FOLDER = "wandb"


def online_folders(run: Path, id: str) -> frozenset[Path]:  # noqa: A002
    """Folders of starts in online mode, whether or not wandb got online."""
    return frozenset((run / FOLDER).glob(f"run-*-{id}"))


def offline_files(run: Path) -> list[Path]:
    """Files of offline starts, oldest first."""
    return sorted((run / FOLDER).glob("offline-run-*/run-*.wandb"))


def is_uploaded(file: Path) -> bool:
    """Whether `wandb sync` has uploaded a file: it then makes a `.synced` file beside it."""
    return file.with_name(f"{file.name}.synced").exists()


def kept_files(run: Path) -> frozenset[Path]:
    """Folders of all starts."""
    return frozenset(path for path in (run / FOLDER).glob("*run-*-*") if path.is_dir() and not path.is_symlink())


def put_aside(run: Path, folders: Iterable[Path], *, keep: bool) -> None:
    """Move folders of starts to `replaced/wandb/`, or remove them."""
    if not keep:
        discard(folders)
        return
    for folder in folders:
        aside = run / REPLACED / FOLDER
        aside.mkdir(parents=True, exist_ok=True)
        folder.rename(aside / folder.name)


def discard(folders: Iterable[Path]) -> None:
    """Remove folders; errors are ignored."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

"""Names of checkpoints on disk, and checks of one that need no torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from titanlab.checkpoint.metadata import read_saved
from titanlab.checkpoint.position import POSITION, SavedPosition, check_files, read_position
from titanlab.errors import ConfigError

PART = ".part"
# Suffix of a checkpoint newer than the one that a person went back to: kept, but no longer the run's.
ASIDE = ".aside"
_STEP = re.compile(r"step-([0-9]+)")
_ANOTHER = "give another checkpoint of the run"


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.partition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run's folder of checkpoints, oldest first; anything else there is ignored."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and (path / ".metadata").exists()]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def of_step(folder: Path, step: int, key: str, value: object) -> Path:
    """The complete checkpoint of one step in a run's folder of checkpoints.

    Args:
        key, value: what the person gave, for the error.

    Raises:
        ConfigError: there is none.
    """
    known = checkpoints(folder)
    for path in known:
        if step_of(path) == step:
            return path
    steps = ", ".join(str(step_of(path)) for path in known)
    raise ConfigError(
        key, value, "the run has no whole checkpoint of this step", f"it has {steps}" if steps else "it has none at all"
    )


def find(text: str, key: str) -> Path:
    """The checkpoint that a path means: itself, also as `step-8`, or the newest of the run there.

    Raises:
        ConfigError: there is none.
    """
    path = Path(text).expanduser()
    step = _STEP.fullmatch(path.name)
    if step is not None and not path.exists():
        path = step_folder(path.parent, int(step[1]))
    if not path.exists():
        raise ConfigError(
            key, text, "there is no such folder", "give the folder of a run, or of one of its checkpoints"
        )
    if (path / POSITION).exists() and (path / ".metadata").exists():
        return path
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise ConfigError(key, text, "holds no complete checkpoint", "give the folder of a run that has saved one")
    return newest


def remove(checkpoint: Path) -> OSError | None:
    """Remove a checkpoint, whole or not; for a symbolic link only the link, never its target.

    Returns:
        what speaks against it: a run must not end because an old checkpoint cannot be removed.
    """
    try:
        if checkpoint.is_symlink() or not checkpoint.is_dir():
            checkpoint.unlink(missing_ok=True)
        else:
            shutil.rmtree(checkpoint)
    except OSError as error:
        return error
    return None


def remove_unfinished(folder: Path) -> None:
    """Remove incomplete checkpoints of processes that died while they saved, of any step."""
    for unfinished in folder.glob(f"step-*{PART}"):
        remove(unfinished)


def put_aside(folder: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints after a step, so that none of them is the run's newest. Returns their new names."""
    renamed = []
    for path in checkpoints(folder):
        if step_of(path) <= after:
            continue
        aside, number = path.with_name(path.name + ASIDE), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}{ASIDE}-{number}")
        path.rename(aside)
        renamed.append(aside)
    return renamed


def read_checked(checkpoint: Path, key: str) -> SavedPosition:
    """The content of a checkpoint's position.json, after it and the files beside it were checked.

    Raises:
        ConfigError: the checkpoint is damaged, or position.json has what no run saves.
    """
    cure = another(checkpoint)
    saved = read_position(checkpoint, key, cure=cure)
    check_files(checkpoint, saved.files, key, cure=cure)
    return saved


def another(checkpoint: Path) -> str:
    """The advice for a checkpoint that cannot be used: the one before it, where there is one."""
    known = checkpoints(checkpoint.parent)
    older = known[: known.index(checkpoint)] if checkpoint in known else []
    return f"{_ANOTHER}: the one before it is {older[-1]}" if older else _ANOTHER


def check_checkpoint(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Check a checkpoint against a model, and read what ranks will read first, before any rank starts.

    Raises:
        ConfigError: it is another model's, or its metadata is damaged or would run code.
    """
    check_shapes(checkpoint, parameters, key)
    read_saved(checkpoint, key)


def check_shapes(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Check a checkpoint against the parameters that a model declares.

    Raises:
        ConfigError: it cannot be read, is damaged, or is another model's.
    """
    saved = dict(read_checked(checkpoint, key).parameters)
    mine = {name: list(shape) for name, shape in parameters.items()}
    if saved == mine:
        return
    name = next(name for name in [*mine, *saved] if saved.get(name) != mine.get(name))
    raise ConfigError(
        key,
        checkpoint,
        f"is of another model: {name} is {_shape(saved.get(name))} there and {_shape(mine.get(name))} here",
        "choose the model that it was trained as",
    )


def check_step(checkpoint: Path, steps: int) -> None:
    """Check a checkpoint that a new run starts from against the run's length.

    Raises:
        ConfigError: no step would be left.
    """
    step = read_position(checkpoint, "checkpoint.load_from", cure=_ANOTHER).position.step
    if step >= steps:
        raise ConfigError(
            "training.steps", steps, f"the checkpoint {checkpoint} is of step {step} already", f"try {2 * step}"
        )


def _shape(shape: list[int] | None) -> str:
    return "absent" if shape is None else "×".join(str(size) for size in shape)

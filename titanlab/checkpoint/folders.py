"""Names of checkpoints on disk, and the checks of a checkpoint that need no torch."""

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
# Suffix of a checkpoint that is newer than the one from which the user has restarted: kept, but not used any more.
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
    complete = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and (path / ".metadata").exists()]
    return sorted(complete, key=lambda path: (step_of(path), path.name))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    known = checkpoints(folder)
    return known[-1] if known else None


def of_step(folder: Path, step: int, key: str, value: object) -> Path:
    """The complete checkpoint of one step in a run's folder of checkpoints.

    Args:
        key, value: the user's input, for the error.

    Raises:
        ConfigError: there is no such checkpoint.
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
    """The checkpoint at a path, whose name may be short (`step-8`), or the newest checkpoint of the run at the path.

    Raises:
        ConfigError: there is no checkpoint.
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
    """Remove a complete or incomplete checkpoint; of a symbolic link only the link, never its target.

    Returns:
        the error if it cannot be removed; it is not raised, because an old checkpoint must not end a run.
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
    """Remove the incomplete checkpoints of any step, which processes leave that die while they save."""
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
    """Read a checkpoint's position.json, and check it and the sizes of the other files.

    Raises:
        ConfigError: the checkpoint is damaged, or position.json has a value that no run saves.
    """
    cure = another(checkpoint)
    saved = read_position(checkpoint, key, cure=cure)
    check_files(checkpoint, saved.files, key, cure=cure)
    return saved


def another(checkpoint: Path) -> str:
    """The hint for a checkpoint that cannot be used: the checkpoint before it, if there is one."""
    known = checkpoints(checkpoint.parent)
    older = known[: known.index(checkpoint)] if checkpoint in known else []
    return f"{_ANOTHER}: the one before it is {older[-1]}" if older else _ANOTHER


def check_checkpoint(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Check that a checkpoint fits a model, and that its metadata can be read, before any rank starts.

    Raises:
        ConfigError: it belongs to another model, or its metadata is damaged or would run code.
    """
    check_shapes(checkpoint, parameters, key)
    read_saved(checkpoint, key)


def check_shapes(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Check that a checkpoint has the parameters that a model declares.

    Raises:
        ConfigError: it cannot be read, is damaged, or belongs to another model.
    """
    saved = dict(read_checked(checkpoint, key).parameters)
    declared = {name: list(shape) for name, shape in parameters.items()}
    if saved == declared:
        return
    name = next(name for name in [*declared, *saved] if saved.get(name) != declared.get(name))
    raise ConfigError(
        key,
        checkpoint,
        f"is of another model: {name} is {_shape(saved.get(name))} there and {_shape(declared.get(name))} here",
        "choose the model that it was trained as",
    )


def check_step(checkpoint: Path, steps: int) -> None:
    """Check that a new run has steps left after the checkpoint from which it starts.

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

"""Names of checkpoints on disk: which there are, the newest one, and those that no longer count."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from titanlab.checkpoint.damage import DamagedCheckpoint
from titanlab.checkpoint.older.metadata import METADATA
from titanlab.errors import ConfigError

# Of the checkpoint, written by `titanlab.checkpoint.index.format`.
INDEX = "index.json"
PART = ".part"
# Suffix of a checkpoint that is newer than the one from which the user has restarted: kept, but not used any more.
ASIDE = ".aside"
# Suffix of a checkpoint that was found damaged: kept, but not used any more.
DAMAGED = ".damaged"
_STEP = re.compile(r"step-([0-9]+)")
_ANOTHER = "give another checkpoint of the run"


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.partition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run's folder of checkpoints, oldest first; anything else there is ignored.

    A checkpoint gets its name when it is complete. One that has lost files since counts too, so that it is found
    damaged and not passed over.
    """
    complete = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and is_checkpoint(path)]
    return sorted(complete, key=lambda path: (step_of(path), path.name))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has files of a checkpoint."""
    return has_pickle(path) or os.path.lexists(path / INDEX) or any(path.glob("rank-*.safetensors"))


def has_pickle(checkpoint: Path) -> bool:
    """Whether a checkpoint is of the older format: entries of torch.distributed.checkpoint, and a pickle about them."""
    return os.path.lexists(checkpoint / METADATA) and not os.path.lexists(checkpoint / INDEX)


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
    if is_checkpoint(path):
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
    return [_renamed(path, ASIDE) for path in checkpoints(folder) if step_of(path) > after]


def put_back(renamed: Iterable[Path]) -> None:
    """Give checkpoints their names again that `put_aside` has renamed."""
    for aside in renamed:
        path = aside.with_name(aside.name.partition(ASIDE)[0])
        if not os.path.lexists(path):
            aside.rename(path)


def fall_back(error: DamagedCheckpoint) -> str:
    """Rename a damaged checkpoint, so that the one before it is the run's newest.

    It must not stay among the checkpoints: it would count as one of the newest that a run keeps.

    Returns:
        a line for the user.

    Raises:
        DamagedCheckpoint: there is no checkpoint before it; nothing was changed.
    """
    checkpoint = Path(str(error.value))
    older = before(checkpoint)
    if older is None:
        raise error
    renamed = _renamed(checkpoint, DAMAGED)
    return f"goes on from step {step_of(older)}: {checkpoint.name} {error.rule}; it is kept as {renamed.name}"


def before(checkpoint: Path) -> Path | None:
    """The checkpoint before another one in its folder; None if there is none."""
    known = checkpoints(checkpoint.parent)
    older = known[: known.index(checkpoint)] if checkpoint in known else []
    return older[-1] if older else None


def _renamed(checkpoint: Path, suffix: str) -> Path:
    renamed, number = checkpoint.with_name(checkpoint.name + suffix), 1
    while os.path.lexists(renamed):
        number += 1
        renamed = checkpoint.with_name(f"{checkpoint.name}{suffix}-{number}")
    return checkpoint.rename(renamed)


def another(checkpoint: Path) -> str:
    """The hint for a checkpoint that cannot be used: the checkpoint before it, if there is one."""
    older = before(checkpoint)
    return _ANOTHER if older is None else f"{_ANOTHER}: the one before it is {older}"

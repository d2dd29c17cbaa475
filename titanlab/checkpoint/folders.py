"""Names of checkpoints on disk, and what can be said of one without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from titanlab.checkpoint.metadata import read_saved
from titanlab.errors import ConfigError

PART = ".part"
POSITION = "position.json"


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.partition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run's folder of checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != PART and (path / ".metadata").exists())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def find(text: str, key: str) -> Path:
    """The checkpoint that a path means: itself, or the newest of the run there.

    Raises:
        ConfigError: there is none.
    """
    path = Path(text)
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


def check_checkpoint(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Hold a checkpoint against a model, and read what ranks will read of it first, before any rank starts.

    Raises:
        ConfigError: it is another model's, or its metadata is damaged or would run code.
    """
    check_shapes(checkpoint, parameters, key)
    read_saved(checkpoint, key)


def check_shapes(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Hold a checkpoint against the parameters that a model declares.

    Raises:
        ConfigError: it cannot be read, or is another model's.
    """
    try:
        saved = dict(json.loads((checkpoint / POSITION).read_text())["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            key, checkpoint, f"cannot be read ({type(error).__name__})", "give another checkpoint of the run"
        ) from error
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
    """Hold a checkpoint that a new run is to start from against the run's length.

    Raises:
        ConfigError: no step would be left.
    """
    step = json.loads((checkpoint / POSITION).read_text())["step"]
    if step >= steps:
        raise ConfigError(
            "training.steps", steps, f"the checkpoint {checkpoint} is of step {step} already", f"try {2 * step}"
        )


def _shape(shape: list[int] | None) -> str:
    return "absent" if shape is None else "×".join(str(size) for size in shape)

"""position.json of a checkpoint: the run's progress without its tensors. Read and checked without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

POSITION = "position.json"


@dataclass(frozen=True, kw_only=True)
class Position:
    """A run's progress without its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: labels that have counted so far.
        data: state of the data stream.
        tracker: the run's id in the tracker.
        layout: degrees of the layout that saved the checkpoint, for users.
        loss_scale: state of the loss scale, see `titanlab.precision.loss_scale`; empty without loss scaling.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    tracker: str | None = None
    layout: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """The content of position.json.

    Attributes:
        position: the run's progress.
        parameters: shapes of the model's parameters, by name.
        files: sizes in bytes of the checkpoint's other files, by name; empty in checkpoints of older versions.
    """

    position: Position
    parameters: Mapping[str, list[int]]
    files: Mapping[str, int]


def read_position(checkpoint: Path, key: str, *, cure: str) -> SavedPosition:
    """Read position.json, and check every value in it.

    Args:
        key, cure: for the error.

    Raises:
        ConfigError: it is missing, is not JSON, lacks a key, or has a key or a value that no run saves.
    """
    try:
        saved = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
        parameters, step = dict(saved["parameters"]), saved["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(key, checkpoint, f"cannot be read ({type(error).__name__})", cure) from error
    known = {field.name for field in fields(Position)}
    for name, value in saved.items():
        if name not in _RULES:
            raise ConfigError(key, checkpoint, f"its {POSITION} has a key that is not known, {name}", cure)
        is_valid, wanted = _RULES[name]
        if not is_valid(value):
            raise ConfigError(key, checkpoint, f"its {POSITION} has {name}={json.dumps(value)}: {wanted}", cure)
    step_in_name = _step_in_name(checkpoint)
    if step_in_name not in (None, step):
        rule = f"its {POSITION} is of step {step}, and the folder's name says {step_in_name}"
        raise ConfigError(key, checkpoint, rule, cure)
    position = Position(**{name: value for name, value in saved.items() if name in known})
    return SavedPosition(position=position, parameters=parameters, files=saved.get("files", {}))


def check_progress(
    position: Position, *, steps: int, tokens_per_step: int, global_batch: int, checkpoint: Path, key: str, cure: str
) -> None:
    """Check that the position of a run's own checkpoint is possible in its recipe.

    Args:
        steps: of the run.
        tokens_per_step, global_batch: labels and sequences of a step; 0 if the run started from another checkpoint.

    Raises:
        ConfigError: the position has more steps than the run, or its tokens or samples do not fit its step.
    """
    step, tokens, samples = position.step, position.tokens, position.data.get("samples")
    rule = None
    if step > steps:
        rule = f"is of step {step}, and the run has {steps} steps"
    elif step and not position.data:
        rule = f"its {POSITION} has no position in the data"
    elif global_batch and tokens > step * tokens_per_step:
        most = step * tokens_per_step
        rule = f"its {POSITION} has tokens={tokens}, and {step} steps of this run have {most} at most"
    elif global_batch and isinstance(samples, int) and samples != step * global_batch:
        rule = f"its {POSITION} has data.samples={samples}, and {step} steps of this run take {step * global_batch}"
    if rule is not None:
        raise ConfigError(key, checkpoint, rule, cure)


def check_files(checkpoint: Path, files: Mapping[str, int], key: str, *, cure: str) -> None:
    """Check that a checkpoint's files have the sizes that they had when it was saved.

    Raises:
        ConfigError: a file is missing, or has another size.
    """
    for name, size in files.items():
        try:
            actual = (checkpoint / name).stat().st_size
        except OSError:
            raise ConfigError(key, checkpoint, f"is damaged: its file {name} is missing", cure) from None
        if actual != size:
            rule = f"is damaged: its file {name} has {actual} bytes, and had {size} when it was saved"
            raise ConfigError(key, checkpoint, rule, cure)


def _step_in_name(checkpoint: Path) -> int | None:
    """The step in a folder's name; None for a folder with a name of the user's choice."""
    word, _, digits = checkpoint.name.partition("-")
    return int(digits) if word == "step" and digits.isdecimal() and digits.isascii() else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_mapping(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_valid(inner) for inner in value.values())


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(size) for size in value)


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


_COUNT = "must be a whole number from 0"
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, _COUNT),
    "tokens": (_is_count, _COUNT),
    "data": (lambda value: isinstance(value, dict), "must be a mapping"),
    "tracker": (lambda value: value is None or isinstance(value, str), "must be text or null"),
    "layout": (lambda value: _is_mapping(value, _is_count), "must be a mapping to whole numbers"),
    "loss_scale": (
        lambda value: _is_mapping(value, lambda inner: isinstance(inner, (int, float)) and not isinstance(inner, bool)),
        "must be a mapping to numbers",
    ),
    "parameters": (lambda value: _is_mapping(value, _is_shape), "must be a mapping to shapes"),
    "files": (
        lambda value: _is_mapping(value, _is_count) and all(map(_is_file_name, value)),
        "must be a mapping from names of files to sizes",
    ),
}

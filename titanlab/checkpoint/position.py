"""position.json of a checkpoint: everything that is no tensor. Read and checked without torch."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import DamagedCheckpoint, DamagedFile, one_line, read_regular
from titanlab.checkpoint.folders import step_named
from titanlab.checkpoint.index import strict_json
from titanlab.checkpoint.objects import objects_below
from titanlab.errors import ConfigError
from titanlab.system.files import finite
from titanlab.system.text import counted

POSITION = "position.json"
MODEL = "model"
"""`contents` of a checkpoint without the optimizer."""
# With 512 ranks on GPUs about a fifteenth of it.
MOST_BYTES = 1 << 28
_MOST_STATE_BYTES = 1 << 16
"""Size limit of one generator's state; the largest, as JSON, takes 8 KiB."""
# Normal numbers of float32.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STATE_NAMES = ("cpu", "python", "numpy", "cuda")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A run's progress without its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: labels that have counted so far.
        data: state of the data stream.
        tracker: the run's id in the tracker.
        layout: degrees of the layout that saved the checkpoint, for users.
        loss_scale: state of the loss scale, see `titanlab.techniques.precision.cast`; empty without loss scaling.
        routing: by block, state of the balance of its experts, see `titanlab.train.balance`; empty without experts.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    tracker: str | None = None
    layout: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, float] = field(default_factory=dict)
    routing: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """The content of position.json.

    Attributes:
        position: the run's progress.
        parameters: shapes of the model's parameters, by name.
        files: sizes in bytes of the checkpoint's files of tensors, by name.
        generators: states of the random generators, by rank and by name; empty in a folder of `export --format dcp`.
        recipe: SHA-256 of the identity of the run that has saved it; None: not known.
        contents: `MODEL` if it has no optimizer; None: it has everything.
    """

    position: Position
    parameters: Mapping[str, list[int]]
    files: Mapping[str, int]
    generators: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    recipe: str | None = None
    contents: str | None = None


def position_bytes(saved: SavedPosition) -> bytes:
    """The content of position.json."""
    generators = {
        str(rank): {name: base64.b64encode(state).decode() for name, state in states.items()}
        for rank, states in saved.generators.items()
    }
    content = {
        **asdict(saved.position),
        "recipe": saved.recipe,
        "parameters": saved.parameters,
        "files": saved.files,
        "generators": generators,
    }
    if not saved.position.routing:
        del content["routing"]
    if saved.contents is not None:
        content["contents"] = saved.contents
    return (json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_position(checkpoint: Place, key: str, *, cure: str, content: bytes | None = None) -> SavedPosition:
    """Read position.json, and check every value in it.

    Args:
        key, cure: for the error.
        content: the file's content, if it has been read already.

    Raises:
        DamagedCheckpoint: it is missing, is not JSON, lacks a key, or has a key or a value that no run saves.
    """
    try:
        saved = strict_json(read_regular(checkpoint / POSITION, MOST_BYTES) if content is None else content)
        parameters, step = dict(saved["parameters"]), saved["step"]
    except DamagedFile as error:
        raise DamagedCheckpoint(key, checkpoint, f"is damaged: {error}", cure) from error
    except OSError as error:
        # The file may be whole: the disk or its permissions are at fault.
        reason = f"its {POSITION} cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError(key, checkpoint, reason, cure) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(key, checkpoint, f"cannot be read ({type(error).__name__})", cure) from error
    known = {field.name for field in fields(Position)}
    for name, value in saved.items():
        if name not in _RULES:
            raise DamagedCheckpoint(
                key, checkpoint, f"its {POSITION} has a key that is not known, {one_line(name)}", cure
            )
        is_valid, wanted = _RULES[name]
        if not is_valid(value):
            rule = f"its {POSITION} has {name}={one_line(json.dumps(value))}: {wanted}"
            raise DamagedCheckpoint(key, checkpoint, rule, cure)
    step_in_name = step_named(checkpoint)
    if step_in_name not in (None, step):
        rule = f"its {POSITION} is of step {step}, and the folder's name says {step_in_name}"
        raise DamagedCheckpoint(key, checkpoint, rule, cure)
    position = Position(**{name: value for name, value in saved.items() if name in known})
    generators = {
        int(rank): {name: base64.b64decode(state) for name, state in states.items()}
        for rank, states in saved.get("generators", {}).items()
    }
    return SavedPosition(
        position=position,
        parameters=parameters,
        files=saved.get("files", {}),
        generators=generators,
        recipe=saved.get("recipe"),
        contents=saved.get("contents"),
    )


def check_progress(
    position: Position, *, steps: int, tokens_per_step: int, global_batch: int, checkpoint: Place, key: str, cure: str
) -> None:
    """Check that the position of a run's own checkpoint is possible in its recipe.

    Args:
        steps: of the run.
        tokens_per_step, global_batch: labels and sequences of a step; 0 if the run started from another checkpoint.

    Raises:
        DamagedCheckpoint: the position has more steps than the run, or its tokens or samples do not fit its step.
    """
    step, tokens, samples = position.step, position.tokens, position.data.get("samples")
    rule = None
    if step > steps:
        rule = f"is of step {step}, and the run has {counted(steps, 'step')}"
    elif step and not position.data:
        rule = f"its {POSITION} has no position in the data"
    elif global_batch and tokens > step * tokens_per_step:
        most = step * tokens_per_step
        rule = f"its {POSITION} has tokens={tokens}, and {step} steps of this run have {most} at most"
    # Rollbacks leave out the samples of whole steps.
    elif global_batch and isinstance(samples, int) and (samples < step * global_batch or samples % global_batch):
        rule = f"its {POSITION} has data.samples={samples}, and {step} steps of this run take {step * global_batch}"
    if rule is not None:
        raise DamagedCheckpoint(key, checkpoint, rule, cure)


def check_files(checkpoint: Place, files: Mapping[str, int], key: str, *, cure: str) -> None:
    """Check that a checkpoint's files have the sizes that they had when it was saved.

    Raises:
        DamagedCheckpoint: a file is missing, or has another size.
        StoreFault: the store does not answer, or refuses.
    """
    # One list of a store, because every rank checks every file.
    known = objects_below(checkpoint) if isinstance(checkpoint, StorePath) else {}
    for name, size in files.items():
        try:
            actual = known[name].size if isinstance(checkpoint, StorePath) else (checkpoint / name).stat().st_size
        except (OSError, KeyError):
            raise DamagedCheckpoint(key, checkpoint, f"is damaged: its file {name} is missing", cure) from None
        if actual != size:
            rule = f"is damaged: its file {name} has {actual} bytes, and had {size} when it was saved"
            raise DamagedCheckpoint(key, checkpoint, rule, cure)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_data(value: Any) -> bool:
    # Whatever else the stream has saved is checked by the stream that resumes from it.
    return isinstance(value, dict) and _is_count(value.get("samples", 0))


def _is_mapping(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_valid(inner) for inner in value.values())


def _is_number(value: Any) -> bool:
    # JSON's 1e400 is infinite, and a whole number can be larger than torch's.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


def _is_loss_scale(value: Any) -> bool:
    """Whether a value is the state of a loss scale. With a factor of 0, for example, no gradient would be finite."""
    if not isinstance(value, dict):
        return False
    counts = [number for name, number in value.items() if name != "scale"]
    scale = value.get("scale", 1.0)
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    return all(map(_is_number, counts)) and is_number and _LEAST_SCALE <= scale <= _MOST_SCALE


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(size) for size in value)


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _is_states(states: Any) -> bool:
    """Whether a value has the states of one rank's generators."""
    return isinstance(states, dict) and all(
        name in _STATE_NAMES and _is_base64(state) for name, state in states.items()
    )


def _is_base64(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > 2 * _MOST_STATE_BYTES:
        return False
    try:
        return len(base64.b64decode(text, validate=True)) <= _MOST_STATE_BYTES
    except (binascii.Error, ValueError):
        return False


def _is_rank(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= 9 and name == str(int(name))


_COUNT = "must be a whole number from 0"
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "contents": (lambda value: value == MODEL, f"must be {MODEL}, or not be there"),
    "step": (_is_count, _COUNT),
    "tokens": (_is_count, _COUNT),
    "data": (_is_data, "must be a mapping, and its samples a whole number from 0"),
    "tracker": (lambda value: value is None or isinstance(value, str), "must be text or null"),
    "layout": (lambda value: _is_mapping(value, _is_count), "must be a mapping to whole numbers"),
    "loss_scale": (_is_loss_scale, "must be a mapping to numbers, and its scale a factor that float32 has"),
    "routing": (
        lambda value: _is_mapping(value, lambda inner: isinstance(inner, list) and all(map(_is_number, inner))),
        "must be a mapping to lists of numbers",
    ),
    "parameters": (lambda value: _is_mapping(value, _is_shape), "must be a mapping to shapes"),
    "files": (
        lambda value: _is_mapping(value, _is_count) and all(map(_is_file_name, value)),
        "must be a mapping from names of files to sizes",
    ),
    "generators": (
        lambda value: _is_mapping(value, _is_states) and all(map(_is_rank, value)),
        "must be a mapping from ranks to states of generators",
    ),
    "recipe": (
        lambda value: value is None or (isinstance(value, str) and bool(_SHA256.fullmatch(value))),
        "must be a SHA-256 or null",
    ),
}

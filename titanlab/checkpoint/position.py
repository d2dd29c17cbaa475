"""position.json of a checkpoint: everything that is no tensor. Read and checked without torch."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import DamagedCheckpoint, DamagedFile, one_line, read_regular
from titanlab.checkpoint.folders import step_named
from titanlab.checkpoint.objects import objects_below
from titanlab.errors import ConfigError
from titanlab.system import counted, finite

POSITION = "position.json"
MODEL = "model"
"""`contents` of a checkpoint without the optimizer."""
# With 512 ranks on GPUs about a fifteenth of it.
MOST_BYTES = 1 << 28
# Normal numbers of float32.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


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
    from titanlab.checkpoint.typed_files import PositionFile, parsed

    try:
        content = read_regular(checkpoint / POSITION, MOST_BYTES) if content is None else content
        file = parsed(content, PositionFile, POSITION)
    except DamagedFile as error:
        raise DamagedCheckpoint(key, checkpoint, f"is damaged: {error}", cure) from error
    except OSError as error:
        # The file may be whole: the disk or its permissions are at fault.
        reason = f"its {POSITION} cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError(key, checkpoint, reason, cure) from error
    rule, step_in_name = None, step_named(checkpoint)
    samples, scale = file.data.get("samples", 0), file.loss_scale.get("scale", 1.0)
    if type(samples) is not int or not 0 <= samples < 2**63:
        rule = f"has data={one_line(json.dumps(file.data))}: its samples must be a whole number from 0"
    elif not _LEAST_SCALE <= scale <= _MOST_SCALE:
        # With a factor of 0, for example, no gradient would be finite.
        rule = f"has loss_scale={json.dumps(file.loss_scale)}: its scale must be a factor that float32 has"
    elif step_in_name not in (None, file.step):
        rule = f"is of step {file.step}, and the folder's name says {step_in_name}"
    if rule is not None:
        raise DamagedCheckpoint(key, checkpoint, f"its {POSITION} {rule}", cure)
    return SavedPosition(
        position=Position(**{field.name: getattr(file, field.name) for field in fields(Position)}),
        parameters=file.parameters,
        files=file.files,
        generators=file.generators,
        recipe=file.recipe,
        contents=file.contents,
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

"""position.json of a checkpoint: everything except tensors. Read and checked without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.folders import step_named
from titanlab.checkpoint.storage import DamagedCheckpoint, DamagedFile, folder_at, one_line
from titanlab.errors import ConfigError
from titanlab.system import counted

T = TypeVar("T")
POSITION = "position.json"
# A file of 512 ranks on GPUs has about a fifteenth of this size.
MOST_BYTES = 1 << 28
# Range of float32's normal numbers.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# The range of torch's numbers: JSON's 1e400 would be infinite.
_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
_FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\x00]+\Z")]
_StateName = Annotated[str, Meta(pattern=r"^(cpu|python|numpy|cuda)\Z")]
_Rank = Annotated[int, Meta(ge=0, lt=10**9)]
# The largest state of a generator, as JSON, takes 8 KiB.
_State = Annotated[bytes, Meta(max_length=1 << 16)]


class Position(Struct, frozen=True, kw_only=True):
    """A run's progress without its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: labels that have counted so far.
        data: state of the data stream.
        tracker: the run's id in the tracker.
        layout: degrees of the layout that saved the checkpoint, for users.
        loss_scale: state of the loss scale, see `titanlab.techniques.precision.cast`; empty without loss scaling.
        routing: by block, state of the balance of its experts, see `titanlab.train.totals`; empty without experts.
    """

    step: _Count = 0
    tokens: _Count = 0
    data: dict[str, Any] = {}  # the stream that resumes checks the rest
    tracker: str | None = None
    layout: dict[str, _Count] = {}
    loss_scale: dict[str, _Number] = {}
    routing: dict[str, list[_Number]] = {}


class SavedPosition(Position, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of position.json; msgspec checks types and ranges while it parses.

    Attributes:
        parameters: shapes of the model's parameters, by name.
        files: sizes in bytes of the checkpoint's files of tensors, by name.
        generators: states of the random generators, by rank and by name; empty in a folder of `export --format dcp`.
        recipe: SHA-256 of the identity of the run that saved the checkpoint; None: not known.
        contents: `model` if the optimizer is missing; None: the checkpoint has everything.
    """

    step: _Count
    recipe: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    parameters: dict[str, list[_Count]]
    files: dict[_FileName, _Count] = {}
    generators: dict[_Rank, dict[_StateName, _State]] = {}
    contents: Literal["model"] | None = None

    @property
    def position(self) -> Position:
        return Position(**{name: getattr(self, name) for name in Position.__struct_fields__})


def position_bytes(saved: SavedPosition) -> bytes:
    content = structs.asdict(saved)
    if not saved.routing:
        del content["routing"]
    if saved.contents is None:
        del content["contents"]
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def parsed(content: bytes, kind: type[T], name: str) -> T:
    """The content of a file of a checkpoint.

    Raises:
        DamagedFile: it is not JSON, or a value has the wrong type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        where = re.sub(r"^`(key` in `)?\$\.?|`$", "", place)
        text = f"has {where}: {rule}" if where else f"does not fit ({rule})"
        raise DamagedFile(f"its {name} {one_line(text)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"its file {name} is no JSON ({one_line(error)})") from error


def read_position(checkpoint: Place, key: str, *, cure: str, content: bytes | None = None) -> SavedPosition:
    """Read position.json, and check every value in it.

    Args:
        key, cure: for the error.
        content: the file's content, if it has been read already.

    Raises:
        DamagedCheckpoint: it is missing, is not JSON, lacks a key, or has a key or a value that no run saves.
    """
    try:
        content = folder_at(checkpoint).read(POSITION, MOST_BYTES) if content is None else content
        file = parsed(content, SavedPosition, POSITION)
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
    return file


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
    # Rollbacks skip the samples of whole steps, so more samples are possible.
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
    known = folder_at(checkpoint).sizes(files)
    for name, size in files.items():
        if name not in known:
            raise DamagedCheckpoint(key, checkpoint, f"is damaged: its file {name} is missing", cure)
        if known[name] != size:
            rule = f"is damaged: its file {name} has {known[name]} bytes, and had {size} when it was saved"
            raise DamagedCheckpoint(key, checkpoint, rule, cure)

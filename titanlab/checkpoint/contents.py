"""Reads and checks what checkpoints contain, without torch and without reading tensors; lists a run's checkpoints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.folders import ASIDE, DAMAGED, damaged, earlier_hint, find, step_named
from titanlab.checkpoint.storage import (
    INDEX,
    PART,
    BlockReader,
    DamagedCheckpoint,
    DamagedFile,
    folder_at,
    one_line,
    parsed,
)
from titanlab.errors import ConfigError
from titanlab.techniques.optimizer.optimizers_schema import CODES

if TYPE_CHECKING:
    from titanlab.checkpoint.index import IndexedFile, IndexedTensor

POSITION = "position.json"
# Largest accepted size of position.json: about 15 times the size in a run with 512 ranks on GPUs.
MOST_BYTES = 1 << 28

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Numbers that torch can take. JSON has larger ones, such as 1e400, which would become infinite.
_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
# The smallest normal number of float32.
_LEAST_SCALE = 2.0**-126
_FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\x00]+\Z")]
_StateName = Annotated[str, Meta(pattern=r"^(cpu|python|numpy|cuda)\Z")]
_Rank = Annotated[int, Meta(ge=0, lt=10**9)]
# The largest state of a random generator takes 8 KiB as JSON, so 64 KiB are enough.
_State = Annotated[bytes, Meta(max_length=1 << 16)]


class Position(Struct, frozen=True, kw_only=True):
    """How far a run is: its state except tensors and random generators.

    Attributes:
        step: number of optimizer steps done.
        tokens: number of labels that have counted in the loss so far.
        data: state of the data stream.
        tracker: the run's id in the tracker.
        layout: parallelism degrees of the run that saved the checkpoint; they are only shown to users.
        loss_scale: state of the loss scale, see `titanlab.techniques.precision.cast`; empty without loss scaling.
        routing: the experts' biases or shares by transformer block: `Balance.state` of `titanlab.train.totals`.
    """

    step: _Count = 0
    tokens: _Count = 0
    data: dict[str, Any] = {}  # the stream that resumes checks the values
    tracker: str | None = None
    layout: dict[str, _Count] = {}
    loss_scale: dict[str, _Number] = {}
    routing: dict[str, list[_Number]] = {}

    def __post_init__(self) -> None:
        # The scale must be a normal float32, because training divides by it; the other entries are counts.
        for name, value in self.loss_scale.items():
            if value < (_LEAST_SCALE if name == "scale" else 0):
                rule = "must be positive" if name == "scale" else "must not be negative"
                raise ValueError(f"loss_scale has {name}={value}, which {rule}")


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


def read_position(checkpoint: Place, key: str, content: bytes | None = None) -> SavedPosition:
    """Read and check position.json; `content`: the bytes of the file if they have been read already.

    Raises:
        DamagedCheckpoint: the file is missing, is not JSON, lacks a key, or has a key or value that no run saves.
    """
    with _usable(checkpoint, key, POSITION):
        content = folder_at(checkpoint).read(POSITION, MOST_BYTES) if content is None else content
        file = parsed(content, SavedPosition, POSITION)
    step = step_named(checkpoint)
    if step not in (None, file.step):
        rule = f"its {POSITION} is of step {file.step}, and the folder's name says {step}"
        raise DamagedCheckpoint(key, checkpoint, rule, earlier_hint(checkpoint))
    return file


def check_files(checkpoint: Place, files: Mapping[str, int], key: str) -> None:
    """Check that a checkpoint's files have the sizes that they had when it was saved."""
    known = folder_at(checkpoint).sizes(files)
    for name, size in files.items():
        if known.get(name) != size:
            rule = f"has {known[name]} bytes, and had {size} when it was saved" if name in known else "is missing"
            raise damaged(checkpoint, key, f"its file {name} {rule}")


# Prefix of the names of an optimizer's states; a parameter's name follows.
_STATES = "optimizer.state."
KEY = "checkpoint.load_from"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint without the bytes of its tensors.

    Attributes:
        key: the config key or argument that names the checkpoint, for errors.
        tensors: each tensor's dtype, shape and chunks, by the tensor's name.
        objects: values of the entries that are not tensors; or, if `chunk` is given, the arguments of `chunk`.
        files: the files to which the tensors' chunks refer by number.
        chunk: reads a chunk of a file in another format: file, first byte, bytes → the tensor or the value; None: the
            files have titanlab's format.
    """

    checkpoint: Place
    key: str
    saved: SavedPosition
    tensors: Mapping[str, IndexedTensor]
    objects: Mapping[str, Any]
    files: Sequence[IndexedFile] = ()
    chunk: Callable[[int, int, int], Any] | None = None

    @property
    def names(self) -> AbstractSet[str]:
        return self.tensors.keys() | self.objects.keys()

    def verify(self) -> None:
        """Read all files and compare every block with its checksum."""
        for file in self.files:
            try:
                with BlockReader(self.checkpoint / file.name, file.size, file.checksums) as reader:
                    reader.verify()
            except DamagedFile as error:
                raise self.damaged(error) from error

    def damaged(self, reason: object) -> DamagedCheckpoint:
        return damaged(self.checkpoint, self.key, reason)

    def unusable(self, rule: str) -> DamagedCheckpoint:
        """As `damaged`, but with a rule that the caller words."""
        return DamagedCheckpoint(self.key, self.checkpoint, rule, earlier_hint(self.checkpoint))

    def refused(self, rule: str, cure: str | None = None) -> ConfigError:
        """The error about a checkpoint that need not be damaged; `cure` None: suggest the checkpoint before it."""
        return ConfigError(self.key, self.checkpoint, rule, cure or earlier_hint(self.checkpoint))

    def check_model(self, parameters: Mapping[str, tuple[int, ...]], *, without: Collection[str] = ()) -> None:
        """Check that the checkpoint fits a model, before any rank starts.

        Args:
            without: names of parameters that will not be read.
        """
        there = {name: shape for name, shape in self.saved.parameters.items() if name not in without}
        here = {name: list(shape) for name, shape in parameters.items() if name not in without}
        if there == here:
            return
        name = next(name for name in [*here, *there] if there.get(name) != here.get(name))
        shapes = (one_line("×".join(map(str, known[name]))) if name in known else "absent" for known in (there, here))
        rule = "is of another model: {} is {} there and {} here".format(one_line(name), *shapes)
        raise self.refused(rule, "choose the model that it was trained as")

    def check_whole(self) -> None:
        """Check that a run can resume from the checkpoint."""
        if self.saved.contents is not None:
            rule = "has the model only (checkpoint.last=model), so no run resumes from it"
            cure = f"start a new run with init_from={self.checkpoint}, or {earlier_hint(self.checkpoint)}"
            raise self.refused(rule, cure)

    def check_optimizer(self, names: Sequence[str]) -> None:
        """Check that the checkpoint has the optimizer's state in the form that this optimizer and layout need.

        Args:
            names: names of the optimizer's entries in the run that loads.
        """
        known = self.names
        degrees = " ".join(f"parallelism.{axis}={degree}" for axis, degree in self.saved.layout.items())
        layout = f"resume under its layout ({one_line(degrees)}), or one with its tensor degree"
        weights = f"or take its weights only: init_from={self.checkpoint}"
        for name in names:
            if name not in known and known & {f"{name}{CODES}", name.removesuffix(CODES)}:
                entry, few = name.removesuffix(CODES), "few bits, and this run has it in full precision"
                few = few if entry == name else "full precision, and this run has it in few bits"
                rule = f"has {one_line(entry)} in {few}: its optimizer has another kind or block_size, or its layout "
                rule += "cuts the rows of that matrix otherwise"
                raise self.refused(rule, f"keep its optimizer, and {layout}; {weights}")
        states = {name.rpartition(".")[2] for name in known}
        for name in names:
            parameter, _, state = name.removeprefix(_STATES).rpartition(".")
            rule = f"has no {one_line(state)} of {one_line(parameter)}"
            if name.startswith(_STATES) and state not in states:
                raise self.refused(f"{rule}: it was saved with another optimizer", f"keep its optimizer, {weights}")
            if name.startswith(_STATES) and name not in known:
                rule += ", which was frozen there, or had another optimizer"
                raise self.refused(rule, f"keep its optimizer and training.freeze, {weights}")

    def check_step(self, steps: int) -> None:
        """Check that a new run that starts from this checkpoint has steps left; `steps`: the run's last step."""
        if (step := self.saved.step) >= steps:
            rule = f"the checkpoint {self.checkpoint} is of step {step} already"
            raise ConfigError("training.steps", steps, rule, f"try {2 * step}")


def read_contents(checkpoint: Place, key: str) -> Contents:
    """Read a checkpoint's index and position, and check them and the sizes of its other files."""
    # Imported here: it needs numpy, and a command that starts a new run reads no index.
    from titanlab.checkpoint.index import OtherFormat, PositionSum, read_index

    try:
        with _usable(checkpoint, key, INDEX):
            index, tensors = read_index(checkpoint)
    except OtherFormat as error:
        raise ConfigError(key, checkpoint, one_line(error), "use the version of titanlab that saved it") from error
    with _usable(checkpoint, key, POSITION):
        content = folder_at(checkpoint).read(POSITION, MOST_BYTES)
    if PositionSum.of(content) != index.position:
        raise damaged(checkpoint, key, f"its file {POSITION} has other bytes than were saved")
    saved = read_position(checkpoint, key, content)
    check_files(checkpoint, {file.name: file.size for file in index.files}, key)
    return Contents(
        checkpoint=checkpoint, key=key, saved=saved, tensors=tensors, objects=index.objects, files=index.files
    )


@contextlib.contextmanager
def _usable(checkpoint: Place, key: str, name: str) -> Iterator[None]:
    """A context in which a file is read; errors of reading it are raised as ConfigError."""
    try:
        yield
    except DamagedFile as error:
        raise damaged(checkpoint, key, error) from error
    except OSError as error:
        # The file need not be damaged: the disk or its permissions are at fault.
        reason = f"its file {name} cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError(key, checkpoint, reason, earlier_hint(checkpoint)) from error


def parent_of(load_from: str | None) -> dict[str, Any]:
    """`parent_run` (sweep and folder) and `parent_step` for identity.json; empty if there is no parent."""
    if load_from is None:
        return {}
    try:
        # Resolve the path: it may be relative or a link.
        checkpoint = find(load_from, KEY).resolve()
        # A folder that was copied out of its run may have another name: then read the step from its file.
        step = step_named(checkpoint)
        if step is None:
            step = read_position(checkpoint, KEY).step
    except ConfigError:
        # The checkpoint may have been removed since the run began. The run has the record of its parent already.
        return {}
    name = str(checkpoint)
    if isinstance(checkpoint, Path):
        run = checkpoint.parent.parent
        name = f"{run.parent.name}/{run.name}" if (run / "config.yaml").is_file() else name
    return {"parent_run": name, "parent_step": step}


_NAME = re.compile(r"step-([0-9]+)((?:\.[a-z]+)?)(?:-[0-9]+)?")
_STATE_OF_SUFFIX = {"": "complete", PART: "unfinished", ASIDE: "put aside", DAMAGED: "damaged"}


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A folder in a run's folder of checkpoints.

    Attributes:
        name: name of the folder.
        step: the step in this name.
        state: `complete`; `unfinished`: its save has not ended; `put aside`: the user has gone back to an earlier
            step; `damaged`.
        bytes: size of its files together.
        saved: the time at which it was complete, in seconds since the epoch.
        verified: whether all bytes were read and have the saved checksums; None: the bytes were not read.
        problem: the fault of the checkpoint, in one line; None: no fault is known.
    """

    name: str
    step: int
    state: str
    bytes: int
    saved: float
    verified: bool | None
    problem: str | None


def list_checkpoints(folder: Place, *, verifies: bool) -> list[ListedCheckpoint]:
    """All checkpoints in a run's folder of checkpoints, by step.

    Args:
        verifies: whether to read every byte of complete checkpoints; otherwise only their index and position.
    """
    rows = []
    for name, counts in folder_at(folder).steps().items():
        path, match = folder / name, _NAME.fullmatch(name)
        state = _STATE_OF_SUFFIX.get(match[2]) if match else None
        if match is None or state is None or not counts:
            continue
        verified, problem = None, None
        if state == "complete":
            try:
                contents = read_contents(path, "run")
                if verifies:
                    contents.verify()
                    verified = True
            except ConfigError as error:
                verified, problem = False if verifies else None, error.rule
        size, saved = folder_at(path).describe()
        rows.append(
            ListedCheckpoint(
                name=name,
                step=int(match[1]),
                state=state if problem is None else "damaged",
                bytes=size,
                saved=saved,
                verified=verified,
                problem=problem,
            )
        )
    return sorted(rows, key=lambda row: (row.step, row.name))

"""What a checkpoint of either format contains, read and checked without torch and without its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlab.checkpoint.blocks import checksum, read_regular
from titanlab.checkpoint.damage import DamagedCheckpoint, DamagedFile, one_line
from titanlab.checkpoint.folders import INDEX, another, has_pickle, is_checkpoint
from titanlab.checkpoint.index.format import Index, OtherFormat
from titanlab.checkpoint.older.metadata import SavedState, read_saved
from titanlab.checkpoint.position import (
    MOST_BYTES,
    POSITION,
    SavedPosition,
    check_files,
    read_position,
)
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.errors import ConfigError
from titanlab.optimizer.low_bit_schema import CODES

# Before the names of parameters in those of an optimizer's states.
_STATES = "optimizer.state."


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint without the bytes of its tensors.

    Attributes:
        saved: position.json.
        entries: index.json; of the older format `.metadata`.
    """

    saved: SavedPosition
    entries: Index | SavedState


def read_contents(checkpoint: Place, key: str) -> Contents:
    """Read a checkpoint's index and position, and check them and the sizes of its other files.

    Raises:
        DamagedCheckpoint: it is damaged, or has a value that no run saves.
        ConfigError: it is of a later format.
    """
    cure = another(checkpoint)
    if has_pickle(checkpoint):
        saved = read_position(checkpoint, key, cure=cure)
        check_files(checkpoint, saved.files, key, cure=cure)
        return Contents(saved=saved, entries=read_saved(checkpoint, key))
    index = indexed(checkpoint, key)
    try:
        content = read_regular(checkpoint / POSITION, MOST_BYTES)
    except DamagedFile as error:
        raise damaged(checkpoint, key, error) from error
    except OSError as error:
        raise _unreadable(checkpoint, key, POSITION, error) from error
    if len(content) != index.position_bytes or checksum(content) != index.position_checksum:
        raise damaged(checkpoint, key, f"its file {POSITION} has other bytes than were saved")
    saved = read_position(checkpoint, key, cure=cure, content=content)
    if saved.files != {file.name: file.size for file in index.files}:
        raise damaged(checkpoint, key, f"its {POSITION} and its {INDEX} have other files")
    check_files(checkpoint, saved.files, key, cure=cure)
    return Contents(saved=saved, entries=index)


def indexed(checkpoint: Place, key: str) -> Index:
    """The index of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing or damaged.
        ConfigError: it is of a later format.
    """
    # Imported here: it needs numpy, and a command that starts a new run reads no index.
    from titanlab.checkpoint.index.reader import read_index

    try:
        return read_index(checkpoint)
    except DamagedFile as error:
        raise damaged(checkpoint, key, error) from error
    except OtherFormat as error:
        raise ConfigError(key, checkpoint, one_line(error), "use the version of titanlab that saved it") from error
    except OSError as error:
        raise _unreadable(checkpoint, key, INDEX, error) from error


def damaged(checkpoint: Place, key: str, reason: object) -> DamagedCheckpoint:
    """The error about a damaged checkpoint, which names the one before it."""
    if not is_checkpoint(checkpoint):
        rule = "was removed while it was read"
        return DamagedCheckpoint(key, checkpoint, rule, "try again: its run keeps newer ones (checkpoint.keep)")
    return DamagedCheckpoint(key, checkpoint, f"is damaged: {one_line(reason)}", another(checkpoint))


def check_checkpoint(checkpoint: Place, parameters: Mapping[str, tuple[int, ...]], key: str) -> SavedPosition:
    """Check that a checkpoint fits a model, and that its entries can be read, before any rank starts.

    Returns:
        its position.json.

    Raises:
        DamagedCheckpoint: it is damaged or would run code.
        ConfigError: it belongs to another model.
    """
    saved = read_contents(checkpoint, key).saved
    saved_shapes = dict(saved.parameters)
    declared = {name: list(shape) for name, shape in parameters.items()}
    if saved_shapes == declared:
        return saved
    name = next(name for name in [*declared, *saved_shapes] if saved_shapes.get(name) != declared.get(name))
    shapes = f"{one_line(name)} is {_shape(saved_shapes.get(name))} there and {_shape(declared.get(name))} here"
    raise ConfigError(key, checkpoint, f"is of another model: {shapes}", "choose the model that it was trained as")


def check_whole(checkpoint: Place, saved: SavedPosition, key: str) -> None:
    """Check that a run can resume from a checkpoint.

    Raises:
        ConfigError: it has no optimizer.
    """
    if saved.contents is not None:
        cure = f"start a new run with init_from={checkpoint}, or {another(checkpoint)}"
        raise ConfigError(
            key, checkpoint, "has the model only (checkpoint.last=model), so no run resumes from it", cure
        )


def check_optimizer(checkpoint: Place, contents: Contents, names: Sequence[str], key: str) -> None:
    """Check that a checkpoint has the optimizer's state in the form that this optimizer and layout need.

    Args:
        names: of the optimizer's entries in the model that loads.

    Raises:
        ConfigError: one of them has few bits there and not here, or the other way round; or no parameter has such a
            state there.
    """
    known = {*contents.entries.tensors, *contents.entries.objects}
    layout = f"resume under its layout ({_degrees(contents.saved)}), or one with its tensor degree"
    weights = f"or take its weights only: init_from={checkpoint}"
    for name in names:
        if name not in known and known & {f"{name}{CODES}", name.removesuffix(CODES)}:
            entry, few = name.removesuffix(CODES), "few bits there and not"
            few = few if entry == name else "full there and few bits"
            rule = f"has {one_line(entry)} in {few} here: its optimizer has another kind or block_size, or its layout "
            rule += "cuts the rows of that matrix otherwise"
            raise ConfigError(key, checkpoint, rule, f"keep its optimizer, and {layout}; {weights}")
    states = {name.rpartition(".")[2] for name in known}
    for name in names:
        parameter, _, state = name.removeprefix(_STATES).rpartition(".")
        if name.startswith(_STATES) and state not in states:
            rule = f"has no {one_line(state)} of {one_line(parameter)}: it was saved with another optimizer"
            raise ConfigError(key, checkpoint, rule, f"keep its optimizer, {weights}")


def check_step(checkpoint: Place, saved: SavedPosition, steps: int) -> None:
    """Check that a new run has steps left after the checkpoint from which it starts.

    Raises:
        ConfigError: no step would be left.
    """
    step = saved.position.step
    if step >= steps:
        raise ConfigError(
            "training.steps", steps, f"the checkpoint {checkpoint} is of step {step} already", f"try {2 * step}"
        )


def _unreadable(checkpoint: Place, key: str, name: str, error: OSError) -> ConfigError:
    # The file may be whole: the disk or its permissions are at fault.
    reason = f"its file {name} cannot be read ({error.strerror or type(error).__name__})"
    return ConfigError(key, checkpoint, reason, another(checkpoint))


def _degrees(saved: SavedPosition) -> str:
    return one_line(" ".join(f"parallelism.{axis}={degree}" for axis, degree in saved.position.layout.items()))


def _shape(shape: list[int] | None) -> str:
    return "absent" if shape is None else one_line("×".join(str(size) for size in shape))

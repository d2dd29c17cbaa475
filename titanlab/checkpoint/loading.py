"""Reads checkpoints into models and optimizers under any layout, and verifies each 1 MiB block of a file it reads."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import Contents, Position
from titanlab.checkpoint.index import BYTES, FILE, START, IndexedTensor, needed_spans
from titanlab.checkpoint.storage import BLOCK, BlockReader, DamagedFile
from titanlab.distributed import World
from titanlab.dtensor import own_box
from titanlab.errors import ConfigError
from titanlab.records import first_line

T = TypeVar("T")
# The number of words in the state of numpy's generator.
_WORDS = 624
_MODEL, _OPTIMIZER = "model.", "optimizer."
# Settings of the optimizer, such as the learning rate, are not saved, because the recipe decides them.
_SETTINGS = f"{_OPTIMIZER}param_groups."


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content).cast("B")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype with a name of the index."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Do an action on this rank, and wait for the other ranks; all ranks call it.

    Raises:
        Exception: the error of this rank, or that of another rank. A ConfigError of any rank is raised on all ranks,
        because it is what users should see.
    """
    value, failure = attempted(action)
    raise_first(world.gather(failure), own=failure)
    return value  # type: ignore[return-value]  # None only if the action returns it.


def chosen_by_rank_0(world: World, choose: Callable[[], Place]) -> Place:
    """The checkpoint that rank 0 chooses for all ranks: they could disagree while a run saves and removes some."""
    place = world.share(on_all_ranks(world, lambda: choose() if world.logs else None))
    assert place is not None
    return place


def attempted(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The value of an action, or its error in a form that other ranks can receive."""
    try:
        return action(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            # Some exceptions cannot be pickled; without a replacement no other rank would learn of the failure.
            portable = RuntimeError(first_line(error))
            portable.__cause__ = error
            return None, portable
        return None, error


def raise_first(failures: Sequence[Exception | None], *, own: Exception | None = None) -> None:
    """Raise the most informative error of the ranks; does nothing if no rank failed."""
    known = [failure for failure in failures if failure is not None]
    if not known:
        return
    config_error = next((failure for failure in known if isinstance(failure, ConfigError)), None)
    raise config_error or own or known[0]


class Piece(NamedTuple):
    """What a rank needs of one chunk of a tensor.

    Attributes:
        file, start, size: where the bytes of the whole chunk are.
        offsets: where the piece begins in the chunk.
        shape: shape of the chunk.
        target: the part of the model to fill; it has the shape of the piece.
    """

    file: int
    start: int
    size: int
    offsets: list[int]
    shape: list[int]
    dtype: torch.dtype
    target: Tensor


def load_state(state: dict[str, Any], contents: Contents, world: World | None = None) -> None:
    """Fill a state whose keys are names of entries. All ranks of `world` call it together; None: one process calls it.

    Raises:
        DamagedCheckpoint: a file is missing or damaged, or would run code.
        ConfigError: the checkpoint belongs to another model.
    """

    def read() -> None:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        state.update({name: _value(name, contents) for name in state.keys() - tensors.keys()})
        read_pieces(contents, [piece for name in tensors for piece in _pieces_of(name, tensors[name], contents)])

    if world is None:
        read()
    else:
        on_all_ranks(world, read)


def read_box(contents: Contents, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor, in this process alone; raises as `load_state`."""
    entry = contents.tensors[name]
    box = torch.empty(list(sizes), dtype=dtype_named(entry.dtype))
    read_pieces(contents, _pieces(entry, box, offsets))
    return box


def whole_tensor(contents: Contents, name: str) -> Tensor:
    shape = contents.tensors[name].shape
    return read_box(contents, name, [0] * len(shape), shape)


def _value(name: str, contents: Contents) -> Any:
    if name not in contents.objects:
        raise contents.refused(f"cannot be read ({name} is absent, or is a tensor)")
    value = contents.objects[name]
    return value if contents.chunk is None else contents.chunk(*value)


def _pieces_of(name: str, tensor: Tensor, contents: Contents) -> Iterator[Piece]:
    entry = contents.tensors.get(name)
    if entry is None or entry.shape != tuple(tensor.shape):
        there = "absent" if entry is None else list(entry.shape)
        raise contents.refused(f"cannot be read ({name} is {there} there and {list(tensor.shape)} in the model)")
    if (box := own_box(tensor)) is not None:
        yield from _pieces(entry, *box)


def _pieces(entry: IndexedTensor, box: Tensor, offsets: Sequence[int]) -> Iterator[Piece]:
    """The parts of a box of a tensor, one for each chunk that has a part of the box."""
    lows = np.maximum(entry.offsets, offsets)
    sizes = np.minimum(entry.offsets + entry.sizes, np.add(offsets, box.shape)) - lows
    for number in np.flatnonzero(np.all(sizes > 0, axis=1)):
        ends = zip((lows[number] - offsets).tolist(), sizes[number].tolist(), strict=True)
        chunk = entry.chunks[number].tolist()
        yield Piece(
            file=chunk[FILE],
            start=chunk[START],
            size=chunk[BYTES],
            offsets=(lows[number] - entry.offsets[number]).tolist(),
            shape=entry.sizes[number].tolist(),
            dtype=dtype_named(entry.dtype),
            target=box[tuple(slice(at, at + size) for at, size in ends)],
        )


def read_pieces(contents: Contents, pieces: Iterable[Piece]) -> None:
    """Fill the targets of pieces; a 1 MiB block is read only once, also if it has parts of several tensors.

    Raises:
        DamagedCheckpoint: a file is missing, or a block differs from the saved block.
    """
    # Read in the order of files and bytes, so that only one file is open at a time.
    ordered = sorted(pieces, key=lambda piece: piece[:4])
    if contents.chunk is not None:
        for piece in ordered:
            saved = contents.chunk(*piece[:3])
            if not isinstance(saved, Tensor) or list(saved.shape) != piece.shape:
                raise contents.damaged("a chunk is not the tensor that the metadata name")
            for dim, (offset, length) in enumerate(zip(piece.offsets, piece.target.shape, strict=True)):
                saved = saved.narrow(dim, offset, length)
            piece.target.copy_(saved)
        return
    try:
        for number, of_file in itertools.groupby(ordered, key=lambda piece: piece.file):
            entry = contents.files[number]
            with BlockReader(contents.checkpoint / entry.name, entry.size, entry.checksums) as file:
                for piece in of_file:
                    _read_piece(file, piece)
    except DamagedFile as error:
        raise contents.damaged(error) from error


def _read_piece(file: BlockReader, piece: Piece) -> None:
    shape, offsets, lengths, target = piece.shape, piece.offsets, list(piece.target.shape), piece.target
    spans = needed_spans(shape, offsets, lengths, piece.size // math.prod(shape), BLOCK)
    # If the bytes in the file are exactly those of the target, read into the target without a buffer.
    is_plain = type(target) is Tensor and target.device.type == "cpu" and target.is_contiguous()
    if is_plain and target.dtype == piece.dtype and [end - first for first, end in spans] == [target.nbytes]:
        file.read_into(piece.start + spans[0][0], bytes_of(target))
        return
    # Allocate only those rows of the chunk in which the piece lies, and read only the bytes that the piece needs.
    buffer = torch.empty([*lengths[:1], *shape[1:]], dtype=piece.dtype)
    skipped = offsets[0] * (piece.size // shape[0]) if shape else 0
    content = bytes_of(buffer)
    for first, end in spans:
        file.read_into(piece.start + first, content[first - skipped : end - skipped])
    part = buffer
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        part = part.narrow(dim, offset if dim else 0, length)
    target.copy_(part)


def load(contents: Contents, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Position:
    """Read a checkpoint that any layout wrote into model, optimizer and generators; all ranks call it together.

    Learning rate, weight decay and other settings of the optimizer stay, because the recipe decides them. After an
    error, model and optimizer may hold a part of the checkpoint: load another one, or end. Generators are unchanged.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged.
        ConfigError: it belongs to another model.
    """
    contents.check_whole()
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    current = generator_states(world)
    whole = whole_state(model, optimizer)
    # A checkpoint of fewer ranks or another device lacks states of some generators: these keep the state from the seed.
    saved = contents.saved.generators.get(world.rank, {})
    states = {name: saved[name] for name in current if saved.get(name)}
    state = saved_part(whole)
    on_all_ranks(world, lambda: contents.check_optimizer([name for name in state if name.startswith(_OPTIMIZER)]))
    load_state(state, contents, world)
    try:
        on_all_ranks(world, lambda: restore_generators(states, world, contents))
    except ConfigError:
        set_generators(current, world)
        raise
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_below(_MODEL, state),
        optim_state_dict=_below(_OPTIMIZER, whole | state),
        options=StateDictOptions(strict=True, flatten_optimizer_state_dict=True),
    )
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    return contents.saved.position


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries of model and optimizer by their names in a checkpoint, and the settings of the optimizer."""
    # Flatten, so that every key has a parameter's name: a pipeline stage saves and loads only its own parameters.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=flat)
    state = {f"{_MODEL}{name}": value for name, value in of_model.items()}
    return state | {f"{_OPTIMIZER}{name}": value for name, value in of_optimizer.items()}


def saved_part(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith(_SETTINGS)}


def only_model(state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The model's parameters in a state, cast to a dtype; None: not cast."""
    return {
        name: value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in state.items()
        if name.startswith(_MODEL)
    }


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def generator_states(world: World) -> dict[str, bytes]:
    """The states of this rank's random generators, in the form in which position.json has them."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - third-party code uses this generator
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes(),
        # JSON keeps these whole numbers exactly.
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([kind, np.asarray(words).tolist(), *rest]).encode(),
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device).numpy().tobytes()
    return states


def set_generators(states: Mapping[str, bytes], world: World) -> None:
    """Set the random generators to states from `generator_states`; a generator without a state stays as it is."""
    if "cpu" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["cpu"]), dtype=torch.uint8))
    if "python" in states:
        version, words, gauss = json.loads(states["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        kind, words, position, has_gauss, gauss = json.loads(states["numpy"])
        # Check the position here: numpy does not, and would read memory beyond the words.
        if len(words) != _WORDS or not 0 <= position <= _WORDS:
            raise ValueError("no state of numpy's generator")
        np.random.set_state((kind, np.array(words, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in states:
        state = torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, world.device)


def restore_generators(states: Mapping[str, bytes], world: World, contents: Contents) -> None:
    """Set the random generators. DamagedCheckpoint: a saved state is not a state of its generator."""
    try:
        set_generators(states, world)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
        raise contents.unusable(f"holds no state of a generator ({type(error).__name__})") from error

"""Saves a run's checkpoints: one folder for each step, which is complete or absent.

All ranks write a checkpoint into `step-N.part`. When all files are on the disk, rank 0 renames it to `step-N`, so a
folder without the suffix is complete. A remote store has no rename: there all ranks write to `step-N`, which is
complete when it has its index, the last file that is written.

    step-00000100/
        rank-00000.safetensors   the tensors of model and optimizer that this rank has written
        index.json               where each part of a tensor is; a checksum for each 1 MiB of every file
        position.json            everything else: step, tokens, position in the data, generators, loss scale, tracker id

Nothing is a pickle: the states of the random generators are bytes in position.json. DCP is not used, because its
planners keep several objects for each part of a tensor: 405B parameters over 512 ranks can have 1.4 million parts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import POSITION, Position, SavedPosition, position_bytes
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.folders import checkpoints, remove, remove_unfinished, step_folder, step_of
from titanlab.checkpoint.index import IndexedFile, IndexEntry, check_tensors, index_bytes
from titanlab.checkpoint.loading import (
    attempted,
    bytes_of,
    dtype_named,
    generator_states,
    only_model,
    raise_first,
    saved_part,
    whole_state,
)
from titanlab.checkpoint.storage import (
    INDEX,
    ITEM_BYTES,
    BlockWriter,
    DamagedFile,
    StoreFolder,
    folder_at,
    written_again,
)
from titanlab.distributed import World
from titanlab.dtensor import local_part, own_box
from titanlab.records import first_line
from titanlab.system import disk_fault

# Name of a dtype in torch → in safetensors. Tensors of other dtypes are saved as U8; the index has their true dtype.
_SAFETENSORS: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 8


class Part(NamedTuple):
    """A part of a tensor; or an entry that is not a tensor, which is saved as JSON.

    Attributes:
        name: name of the entry.
        dtype: name of the dtype in torch; empty: the entry is not a tensor.
        shape: shape of the full tensor.
        offsets, sizes: where the part begins in the tensor, and its shape.
        start: the part's first byte in a rank's file.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    start: int = 0

    @property
    def size(self) -> int:
        """Bytes in a rank's file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.sizes) if self.dtype else 0


def parts_of(state: Mapping[str, Any]) -> list[Part]:
    """This rank's parts of a state.

    Raises:
        TypeError: a tensor has a dtype that cannot be saved.
    """
    parts = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            parts.append(Part(name))
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise TypeError(f"{name} has the dtype {dtype}, which a checkpoint cannot hold")
        if (box := own_box(value)) is not None:
            parts.append(Part(name, dtype, tuple(value.shape), box[1], tuple(box[0].shape)))
    return parts


def shared_out(plans: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The parts that each rank writes. If several ranks have a part, the one with the fewest bytes so far writes it."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, parts in enumerate(plans):
        for part in parts:
            ranks.setdefault((part.name, part.offsets), []).append(rank)
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    written = [0] * len(plans)
    for parts in plans:
        for part in parts:
            key = part.name, part.offsets
            if key not in owners:
                owner = owners[key] = min(ranks[key], key=written.__getitem__)
                # Count an entry that is not a tensor as one byte, so that such entries are shared out too.
                written[owner] += part.size if part.dtype else 1
    return [[part for part in parts if owners[part.name, part.offsets] == rank] for rank, parts in enumerate(plans)]


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """The layout of a rank's file.

    Attributes:
        header: the length of safetensors' header, and then this header.
        parts: parts of tensors, in the order of the file.
        objects: names of the entries that this rank writes as JSON.
        size: size of the file in bytes.
    """

    name: str
    header: bytes
    parts: Sequence[Part]
    objects: Sequence[str]
    size: int


def shard_of(parts: Sequence[Part], rank: int) -> CheckpointShard:
    """The layout of the file of a rank that writes these parts; every rank computes the same layout."""
    tensors = [part for part in parts if part.dtype]
    # Put wide elements first, so that every element is aligned.
    tensors.sort(key=lambda part: (-ITEM_BYTES[part.dtype], part.dtype))
    entries, end = {}, 0
    for number, part in enumerate(tensors):
        known, size = _SAFETENSORS.get(part.dtype), part.size
        # Write brackets even without offsets, so that no two parts have the same name.
        entries[f"{part.name}[{','.join(map(str, part.offsets))}]"] = {
            "dtype": known or "U8",
            "shape": list(part.sizes) if known else [size],
            "data_offsets": [end, end + size],
        }
        tensors[number] = Part(*part[:5], end)
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    header = len(header).to_bytes(8, "little") + header
    return CheckpointShard(
        name=f"rank-{rank:05d}.safetensors",
        header=header,
        parts=[Part(*part[:5], len(header) + part.start) for part in tensors],
        objects=[part.name for part in parts if not part.dtype],
        size=len(header) + end,
    )


def entries_of(shards: Sequence[CheckpointShard]) -> dict[str, IndexEntry]:
    """The index's entries of all ranks' tensors.

    Raises:
        ValueError: the parts of a tensor do not cover it exactly.
    """
    tensors: dict[str, IndexEntry] = {}
    for number, shard in enumerate(shards):
        for part in shard.parts:
            entry = tensors.get(part.name)
            if entry is None:
                entry = tensors[part.name] = IndexEntry(dtype=part.dtype, shape=list(part.shape), chunks=[])
            entry.chunks.append([number, part.start, part.size, *part.offsets, *part.sizes])
    try:
        check_tensors(tensors, [shard.size for shard in shards])
    except DamagedFile as error:
        raise ValueError(f"what {len(shards)} ranks have is not a whole checkpoint: {error}") from error
    return tensors


class Plans:
    """Starts the saves of one run, and plans which parts each rank writes.

    A plan is made once, and used while the names, shapes, formats and cuts of the state stay the same on every rank:
    for 405B parameters on 512 ranks planning takes a rank 3 s, and rank 0 21 s (benchmarks/save_planning.py).
    """

    def __init__(self) -> None:
        self._outline: Mapping[str, Any] | None = None
        self._shard: CheckpointShard | None = None
        self._tensors: dict[str, IndexEntry] = {}

    def start(
        self, state: Callable[[], Mapping[str, Any]], folder: Callable[[], Place], saved: SavedPosition, world: World
    ) -> StartedSave:
        """Agree with all ranks on the folder, and on the parts that each rank writes.

        Args:
            state: returns this rank's state, by the names of the entries.
            folder: makes the folder into which all ranks write; called on rank 0 only, so that one rank asks a store.
        """
        entries, failure = attempted(state)
        part, refused = attempted(folder) if world.logs else (None, None)
        outline = None if entries is None else _outline(entries)
        fits = outline is not None and outline == self._outline
        everyone = world.gather((part, refused or failure, fits))
        part = everyone[0][0]
        with removed_after_errors(part, world):
            raise_first([error for _, error, _ in everyone], own=refused or failure)
            assert part is not None
            assert entries is not None
            if not all(fits for _, _, fits in everyone):
                self._outline = None
                self._shard, self._tensors = _planned_together(entries, world)
                self._outline = outline
        assert self._shard is not None
        return StartedSave(folder=part, state=entries, shard=self._shard, tensors=self._tensors, saved=saved)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """The properties on which a plan depends, by the names of the entries."""
    outline: dict[str, Any] = dict.fromkeys(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
            outline[name] = (type(value), value.shape, value.dtype, cut)
    return outline


def _planned_together(state: Mapping[str, Any], world: World) -> tuple[CheckpointShard, dict[str, IndexEntry]]:
    """Plan with all ranks. Returns the layout of this rank's file, and on rank 0 the index's entries."""

    def shared() -> tuple[list[list[Part]], dict[str, IndexEntry]]:
        raise_first([failure for _, failure in gathered])
        plans = shared_out([parts or [] for parts, _ in gathered])
        return plans, entries_of([shard_of(parts, rank) for rank, parts in enumerate(plans)])

    gathered = world.collect(attempted(lambda: parts_of(state)))
    answers: list[tuple[list[Part] | None, Exception | None]] = []
    tensors: dict[str, IndexEntry] = {}
    if world.logs:
        planned, failure = attempted(shared)
        answers = [(None, failure)] * world.world
        if planned is not None:
            tensors = planned[1]
            answers = [(parts, None) for parts in planned[0]]
    own, failure = world.scatter(answers)
    raise_first([failure])
    assert own is not None
    return shard_of(own, world.rank), tensors


@contextlib.contextmanager
def removed_after_errors(part: Place | None, world: World) -> Iterator[None]:
    """A context in which all ranks write into a folder; if it ends with an error, the folder is removed."""
    try:
        yield
    except Exception as error:
        # All ranks raise, so no rank is still writing.
        if world.logs and part is not None:
            # Remove the partial files: on a full disk they would leave no space for the record of the run's outcome.
            remove(part)
        if part is not None and isinstance(error, OSError) and disk_fault(error) is not None:
            # Name a file in the error, because the error of a write names none.
            error.filename = str(part.parent)
        raise


class HostBuffer:
    """Host memory that is allocated once and reused: the kernel must clear new pages, and training would wait for that.

    Attributes:
        page_locked: whether the memory is pinned, so that devices can copy into it asynchronously.
    """

    def __init__(self, *, page_locked: bool = False) -> None:
        self.page_locked = page_locked
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> Tensor:
        """A buffer of `size` bytes, in the same memory as the buffer of an earlier call."""
        if self._memory is None or len(self._memory) < size:
            # Free the smaller memory before the larger one is allocated.
            self._memory = None
            self._memory = self._taken(size)
        return self._memory[:size]

    def _taken(self, size: int) -> Tensor:
        if self.page_locked:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # Raise OSError instead of the device's error, so that a failed save does not end the run.
                raise OSError(errno.ENOMEM, f"the host pins no {size} bytes: {first_line(error)}") from error
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Forked processes need no copy of the memory. Only Linux has MADV_DONTFORK, and a kernel may refuse it.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8)


class Staged(NamedTuple):
    """The data that one rank writes: all bytes of its file in order, and the entries that are not tensors."""

    content: Sequence[Tensor]
    objects: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartedSave:
    """A save that all ranks have agreed on.

    Attributes:
        folder: the folder into which all ranks write.
        state: this rank's entries, which share memory with the model and the optimizer.
        shard: the layout of this rank's file.
        tensors: on rank 0, the index's entries for the tensors of all ranks.
        saved: the content of position.json, with the parameters and generators of this rank only.
    """

    folder: Place
    state: Mapping[str, Any]
    shard: CheckpointShard
    tensors: dict[str, IndexEntry]
    saved: SavedPosition

    def stage(self, into: HostBuffer | None = None) -> Staged:
        """Take the data that this rank writes.

        Args:
            into: copy the file's content to this buffer, so that training may change the tensors during the write.
                None: copy nothing; the tensors must not change before they are written.

        Raises:
            TypeError: an entry is neither a tensor nor a value of JSON.
        """
        shard, objects = self.shard, {}
        for name in shard.objects:
            try:
                objects[name] = json.loads(json.dumps(self.state[name], allow_nan=False))
            except (TypeError, ValueError) as error:
                kind = type(self.state[name]).__qualname__
                raise TypeError(f"{name} is {kind}: a checkpoint holds tensors and values of JSON only") from error
        tensors: list[Tensor] = []
        for part in shard.parts:
            tensor = local_part(self.state[part.name]).detach()
            if tuple(tensor.shape) != part.sizes:
                rule = f"has the shape {list(tensor.shape)}, and the plan says {list(part.sizes)}"
                raise ValueError(f"{part.name} {rule}")
            tensors.append(tensor)
        header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
        if into is None:
            return Staged([header, *tensors], objects)
        # Copy the header too, so that the file's content is one range of memory.
        buffer = into.reserve(shard.size)
        buffer[: len(header)] = header
        for part, tensor in zip(shard.parts, tensors, strict=True):
            place = buffer[part.start : part.start + part.size].view(dtype_named(part.dtype)).view(part.sizes)
            place.copy_(tensor, non_blocking=into.page_locked)
        return Staged([buffer], objects)

    def complete(self, staged: Callable[[], Staged], world: World, finish: Callable[[], None] = lambda: None) -> None:
        """Write every rank's file, then position.json and the index; rank 0 calls `finish` when all are durable.

        Does not use the model, so another thread may call this, with a world of its own.

        Args:
            staged: returns the data that this rank writes, or raises the error of staging it.

        Raises:
            OSError: the disk is full; or the store lacks bytes, does not answer, or refuses.
        """

        def written() -> tuple[IndexedFile, Mapping[str, Any]]:
            data = staged()
            return write(self, data.content), data.objects

        def published() -> None:
            raise_first([failure for _, failure, _ in everyone])
            files: list[IndexedFile] = []
            objects: dict[str, Any] = {}
            parameters: dict[str, list[int]] = {}
            generators: dict[int, dict[str, bytes]] = {}
            for of_rank, _, saved in everyone:
                assert of_rank is not None
                files.append(of_rank[0])
                objects.update(of_rank[1])
                parameters |= saved.parameters
                generators |= saved.generators
            publish(self, files, objects, structs.replace(self.saved, parameters=parameters, generators=generators))
            finish()

        with removed_after_errors(self.folder, world):
            own, failure = attempted(written)
            # Send the checksums only to rank 0: those of a large checkpoint take tens of megabytes.
            everyone = world.collect((own, failure, self.saved))
            raise_first([world.share(attempted(published)[1] if world.logs else None)], own=failure)


def write(started: StartedSave, content: Sequence[Tensor]) -> IndexedFile:
    """Write a rank's file, and wait until it is on the disk or in the store."""
    folder, shard = started.folder, started.shard

    def written() -> IndexedFile:
        with BlockWriter(folder / shard.name, shard.size) as file:
            for tensor in content:
                file.write(bytes_of(tensor.to("cpu").contiguous()))
            file.finish()
        assert file.size == shard.size
        return IndexedFile(name=shard.name, size=file.size, checksums=bytes(file.checksums))

    return written_again(folder, written)


def publish(
    started: StartedSave, files: Sequence[IndexedFile], objects: dict[str, Any], position: SavedPosition
) -> None:
    """Write position.json and then the index, which makes the checkpoint whole, and wait until they are durable.

    Args:
        files: the files of all ranks, by rank.
        position: the content of position.json, without `files`.
    """
    sizes = {file.name: file.size for file in files}
    last = position_bytes(structs.replace(position, files=sizes))
    place = folder_at(started.folder)
    if isinstance(place, StoreFolder):
        place.check_arrived(sizes)
    place.put(POSITION, last)
    place.put(INDEX, index_bytes(position=last, objects=objects, tensors=started.tensors, files=files))


def begin(target: Target, position: Position, plans: Plans, only: OnlyModel | None = None) -> StartedSave:
    """Make the folder of a checkpoint, and agree with all ranks on what each of them writes."""

    def state() -> dict[str, Any]:
        whole = saved_part(whole_state(target.model, target.optimizer))
        return whole if only is None else only_model(whole, None if only.dtype is None else dtype_named(only.dtype))

    def folder() -> Place:
        # Remove what earlier saves left behind before the new folder is made.
        remove_unfinished(target.folder)
        return folder_at(target.folder).begin(step_folder(target.folder, position.step).name)

    saved = SavedPosition(
        **structs.asdict(position),
        # A pipeline stage has only its own parameters; `StartedSave.complete` joins those of all ranks.
        parameters={name: list(parameter.shape) for name, parameter in target.model.named_parameters()},
        generators={target.world.rank: generator_states(target.world)},
        recipe=target.recipe,
        contents=None if only is None else "model",
    )
    return plans.start(state, folder, saved, target.world)


def complete(started: StartedSave, staged: Callable[[], Staged], target: Target) -> None:
    """Write a checkpoint and give it its name; remove old ones that the target does not keep."""

    def finish() -> None:
        final = step_folder(target.folder, started.saved.step)
        if started.folder != final:
            # `final` exists if an earlier attempt saved this step, and the run then resumed from an earlier step.
            failure = remove(final)
            if failure is not None:
                raise failure
            folder_at(started.folder).commit(final)
        target.saved(step_of(final))
        remove_old(target.folder, target.keep, target.keep_every, target.warn)

    started.complete(staged, target.world, finish)


def remove_old(folder: Place, keep: int, keep_every: int, warn: Callable[[str], None]) -> None:
    """Remove old checkpoints; keep the newest `keep` (0: all), and those whose step is a multiple of `keep_every`."""
    for old in checkpoints(folder)[:-keep] if keep else []:
        if keep_every and step_of(old) % keep_every == 0:
            continue
        failure = remove(old)
        if failure is not None:
            warn(f"the old checkpoint {old} cannot be removed: {failure.strerror or failure}")


class SyncSaver(Saver):
    """The saver whose `save` returns when the checkpoint is durable."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._plans = Plans()

    def save(self, position: Position) -> None:
        self.save_last(position)

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        started = begin(self._target, position, self._plans, only_model)
        complete(started, started.stage, self._target)
        self.saved_step = position.step


class AsyncSaver(SyncSaver):
    """The saver whose `save` returns when the state is copied; `save_last` copies nothing, because no step follows.

    The threads of all ranks communicate in a separate group. Only `wait` waits for a thread: if the training ends with
    an error on one rank, threads of the others may wait for that rank until their processes end.
    """

    def __init__(self, target: Target, buffer: HostBuffer | None = None) -> None:
        super().__init__(target)
        # The thread leaves its warnings here for the main thread, because only that may use the console.
        self._warnings: list[str] = []
        self._beside = replace(target, world=target.world.beside(), warn=self._warnings.append)
        self._buffer = buffer or HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def save(self, position: Position) -> None:
        assert self._thread is None, "the last save is under way"
        started = begin(self._target, position, self._plans)
        # Pass an error on to the thread, in which all ranks exchange their errors.
        staged = self._staged(started)

        def finish() -> None:
            try:
                complete(started, staged, self._beside)
                self.saved_step = position.step
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        while self._warnings:
            self._target.warn(self._warnings.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _staged(self, started: StartedSave) -> Callable[[], Staged]:
        """Copy the state. Returns a function for the thread, which returns the copy or raises the error of copying."""
        staged, error = attempted(lambda: started.stage(self._buffer))

        def result() -> Staged:
            if staged is None:
                assert error is not None
                raise error
            return staged

        return result


class PinnedSaver(AsyncSaver):
    """The saver whose `save` returns when copies are queued; on the device the next update waits for these copies."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, HostBuffer(page_locked=True))
        self._device = target.world.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied: torch.cuda.Event | None = None

    def before_update(self) -> None:
        # Let the device wait for the copies; the host does not wait.
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _staged(self, started: StartedSave) -> Callable[[], Staged]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            staged = super()._staged(started)
            copied.record(self._stream)
        self._copied = copied

        def waited() -> Staged:
            copied.synchronize()
            return staged()

        return waited

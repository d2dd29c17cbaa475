"""Reads the weights in titanlab's checkpoints; reads and writes folders of torch.distributed.checkpoint (DCP).

`export --format dcp` and torchtitan write DCP folders.

`.metadata` is a pickle, a program that can call functions of any module, and `FileSystemReader.read_metadata` runs it.
A folder may come from an untrusted source. Here every name in the pickle becomes a class that records its arguments,
and names that are not in `_NAMES` are refused. Nothing is imported, and the pickle can change only classes that are
made for this reading. Then each value's type and range are checked. When DCP uses no pickle, this code can go.
"""

from __future__ import annotations

import io
import operator
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlab.checkpoint import (
    ITEM_BYTES,
    METADATA,
    POSITION,
    Contents,
    DamagedCheckpoint,
    IndexedTensor,
    Place,
    SavedPosition,
    check_files,
    earlier_hint,
    load_state,
    position_bytes,
    read_box,
    read_contents,
    read_position,
    whole_tensor,
)
from titanlab.system import refusal, write_bytes
from titanlab.techniques.model.contract import ModelConfig
from titanlab.train.weights import DTYPES, TensorEntry, WeightsSource, biases_of

# Largest size of the metadata: about five times that of a checkpoint of 405B parameters over 512 ranks.
MOST_BYTES = 1 << 30
_CURE = "give a checkpoint that titanlab has saved, from a source that you trust"
_TYPES, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES = frozenset(
    [
        *((_TYPES, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_TYPES, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
        (_TYPES, "_MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in ITEM_BYTES),
        # The pickle has the checkpoint's path; the module of its class depends on the version of Python.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        # Python before 3.12 writes a member of an enumeration as getattr(class, name). Here getattr is never called.
        ("builtins", "getattr"),
    ]
)


class _Unreadable(ValueError):
    """The bytes are not those of a checkpoint's metadata."""


class _Recorded:
    """A subclass stands for a name in the pickle, and an instance for a call of that name. A dtype is never called.

    Attributes:
        name: name of the class or function, without its module.
        state: argument of `__setstate__`; if it is a mapping, its items become attributes too.
    """

    name, state = "", None

    def __new__(cls, *args: Any) -> _Recorded:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[tuple[str, str], type] = {("torch", "Size"): tuple}

    def find_class(self, module: str, name: str) -> type:
        """Called for each name that the pickle imports."""
        if (module, name) not in _NAMES:
            raise _Unreadable(f"asks for {module}.{name}, which could run code")
        # A new class for each reading: the pickle cannot change a class for later readings.
        return self._classes.setdefault((module, name), type(name, (_Recorded,), {"name": name}))


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Chunk(msgspec.Struct):
    offsets: tuple[_Count, ...]
    sizes: tuple[_Count, ...]


class _Tensor(msgspec.Struct):
    properties: Any
    size: tuple[_Count, ...]
    chunks: list[_Chunk]


class _Index(msgspec.Struct):
    fqn: str
    offset: tuple[_Count, ...] | None = None
    index: _Count | None = None


class _StoredAt(msgspec.Struct):
    """Where the bytes of an entry are: the file, and the range in it."""

    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: None = None


class _Whole(msgspec.Struct):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    version: str | None = None


class _Place(NamedTuple):
    """A range of a file."""

    file: int
    start: int
    size: int


class DcpChunks:
    """Reads tensors and values that torch.save has written; each is a range of bytes in a file of a folder."""

    def __init__(self, folder: Path, key: str, paths: Sequence[str]) -> None:
        self._folder, self._key, self.paths = folder, key, paths
        # Keep the last chunk: a tensor is read a box at a time, and a chunk can hold many boxes.
        self._last: dict[_Place, Any] = {}

    def __call__(self, file: int, start: int, size: int) -> Any:
        """The tensor or value in a range of a file; errors of the disk or of memory pass unchanged.

        Raises:
            DamagedCheckpoint: the file is missing or damaged, or asks for a name that no tensor needs.
        """
        place = _Place(file, start, size)
        if place in self._last:
            return self._last[place]
        # Free the previous chunk before the next is allocated.
        self._last.clear()
        try:
            with (self._folder / self.paths[file]).open("rb") as opened:
                opened.seek(start)
                self._last[place] = torch.load(io.BytesIO(opened.read(size)), map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise self._unreadable(f"it has no file {self.paths[file]}") from error
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Damaged bytes can raise any exception. Keep the reason short: torch writes ten lines about a refused name.
            reason = f"{type(error).__name__}: a file is damaged, or asks for more than tensors"
            raise self._unreadable(reason) from error
        return self._last[place]

    def _unreadable(self, reason: str) -> DamagedCheckpoint:
        rule = f"cannot be read ({reason})"
        return DamagedCheckpoint(self._key, self._folder, rule, earlier_hint(self._folder))


def dcp_contents(checkpoint: Path, key: str, saved: SavedPosition | None = None) -> Contents:
    """Read the metadata of a folder without running code in it.

    Args:
        saved: the position, for a folder without position.json; None: read the position.json of the folder.

    Raises:
        DamagedCheckpoint: a file is missing, damaged or too large, or asks for a name that no checkpoint needs.
    """
    if saved is None:
        saved = read_position(checkpoint, key)
        check_files(checkpoint, saved.files, key)
    path = checkpoint / METADATA
    try:
        if not path.is_file():
            raise _Unreadable("is missing" if not path.exists() else "is not a file")
        if path.stat().st_size > MOST_BYTES:
            raise _Unreadable(f"has {path.stat().st_size} bytes, and {MOST_BYTES} are the most")
        content = path.read_bytes()
        whole = msgspec.convert(_Unpickler(content).load(), _Whole, from_attributes=True)
        paths, places = _places(whole)
        tensors, objects = _entries(whole, places, most_chunks=len(content))
    except _Unreadable as error:
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} {error}", _CURE) from error
    except OSError as error:
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} cannot be read ({error.strerror})", _CURE) from error
    except Exception as error:
        # Damaged bytes can be any opcodes and values, which can raise any exception.
        reason = str(error) if isinstance(error, msgspec.ValidationError) else type(error).__name__
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} is damaged ({reason})", _CURE) from error
    chunks = DcpChunks(checkpoint, key, paths)
    return Contents(checkpoint=checkpoint, key=key, saved=saved, tensors=tensors, objects=objects, chunk=chunks)


def _places(whole: _Whole) -> tuple[list[str], dict[tuple[str, tuple[int, ...] | None], _Place]]:
    """The files' names; and the place of each chunk and object, by the entry's name and the chunk's offsets."""
    numbers: dict[str, int] = {}
    places = {}
    for index, place in whole.storage_data.items():
        at = msgspec.convert(index, _Index, from_attributes=True)
        stored = msgspec.convert(place, _StoredAt, from_attributes=True)
        file = stored.relative_path
        # The file is opened later, so its name must not lead out of the folder. PurePath accepts ".." as a name.
        if file in ("", "..") or PurePath(file).name != file or "\0" in file:
            raise _Unreadable("is damaged (it lacks the name of a file beside it)")
        number = numbers.setdefault(file, len(numbers))
        places[at.fqn, at.offset] = _Place(number, stored.offset, stored.length)
    return list(numbers), places


def _entries(
    whole: _Whole, places: Mapping[tuple[str, tuple[int, ...] | None], _Place], *, most_chunks: int
) -> tuple[dict[str, IndexedTensor], dict[str, _Place]]:
    tensors, objects = {}, {}
    for name, entry in whole.state_dict_metadata.items():
        if isinstance(entry, _Recorded) and entry.name == "BytesStorageMetadata":
            objects[name] = places[name, None]
            continue
        tensor = msgspec.convert(entry, _Tensor, from_attributes=True)
        most_chunks -= len(tensor.chunks)
        if most_chunks < 0:
            # In a pickle many entries can share one list, so a small file could take hours to read.
            raise _Unreadable("is damaged (it has more chunks than bytes)")
        rows = []
        for chunk in tensor.chunks:
            ends = map(operator.add, chunk.offsets, chunk.sizes)
            is_alike = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            if not is_alike or any(end > whole for end, whole in zip(ends, tensor.size, strict=True)):
                raise _Unreadable(f"is damaged (a chunk lies outside of {name!r})")
            if (place := places.get((name, chunk.offsets))) is None:
                raise _Unreadable(f"is damaged (a chunk of {name!r} is in no file)")
            rows.append([place.file, place.start, place.size, *chunk.offsets, *chunk.sizes])
        # The dtype is the first property; the others are the same for all tensors.
        dtype = tensor.properties.state[0].name
        if dtype not in ITEM_BYTES:
            raise _Unreadable("is damaged (it lacks a dtype)")
        chunks = np.array(rows, np.int64).reshape(len(rows), 3 + 2 * len(tensor.size))
        tensors[name] = IndexedTensor(dtype=dtype, shape=tensor.size, chunks=chunks)
    return tensors, objects


# The prefix of parameters' names in titanlab's checkpoints, and that in torchtitan's.
PREFIXES = ("model.", "")


def source_of(contents: Contents, model: ModelConfig, *, prefix: str = PREFIXES[0]) -> CheckpointSource:
    """The weights in a checkpoint.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """
    names, entries = {torch_name: name for name, torch_name in DTYPES.items()}, {}
    for name in model.account().parameters:
        tensor = contents.tensors.get(f"{prefix}{name}")
        if tensor is None or tensor.dtype not in names:
            raise contents.refused(f"has no plain tensor {name}", "give a checkpoint of the same model")
        entries[name] = TensorEntry(dtype=names[tensor.dtype], shape=tensor.shape)
    biases = biases_of(model, contents.saved.routing, contents.key, contents.checkpoint)
    return CheckpointSource(model=model, entries=entries, biases=biases, contents=contents, prefix=prefix)


def dcp_source(folder: Path, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a folder of torch.distributed.checkpoint; its pickle is read as data.

    Args:
        model: config of the model that was saved; the folder has none.

    Raises:
        ConfigError: as `source_of`, or a parameter has another shape.
    """
    contents = dcp_contents(folder, key, SavedPosition(step=0, parameters={}))
    shapes, cure = model.account().parameters, "give the --model that was saved"
    prefix = next((each for each in PREFIXES if any(f"{each}{name}" in contents.tensors for name in shapes)), None)
    if prefix is None:
        first, there = next(iter(shapes)), sorted(contents.names)[:3]
        rule = f"has no parameter of the model, such as {first} or model.{first}; "
        raise contents.refused(f"{rule}it has {', '.join(there) or 'nothing'}", cure)
    source = source_of(contents, model, prefix=prefix)
    for name, shape in shapes.items():
        if source.entries[name].shape != tuple(shape):
            there_shape = list(source.entries[name].shape)
            raise contents.refused(f"{name} is {there_shape} there and {list(shape)} in the model", cure)
    return source


@dataclass(frozen=True, kw_only=True)
class CheckpointSource(WeightsSource):
    """The weights in a checkpoint; it needs no process group.

    Attributes:
        prefix: the prefix of the parameters' names in the checkpoint.
    """

    contents: Contents
    prefix: str

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return read_box(self.contents, f"{self.prefix}{name}", offsets, sizes)

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        # Load all at once: each file is opened once, and a 1 MiB block with parts of several parameters is read once.
        load_state({f"{self.prefix}{name}": parameter for name, parameter in parameters.items()}, self.contents)


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """A planner for DCP's save: it plans by shapes alone, and reads each tensor only when the tensor is written.

    Args:
        names: name of each tensor in the checkpoint, by its name in the folder that is written.
    """

    def __init__(self, contents: Contents, names: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._contents, self._names = contents, names

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A tensor or object of the state, by its name."""
        name = self._names.get(index.fqn)
        return self.state_dict[index.fqn] if name is None else whole_tensor(self._contents, name)


def write_dcp(checkpoint: Place, into: Path, *, prefix: str) -> None:
    """Write `.metadata`, `*.distcp` and `position.json` into a new folder.

    The names of the entries are `model.…` and `optimizer.state.….…`. The folder can be given to
    `checkpoint.load_from`; it has no states of random generators.

    Args:
        prefix: the prefix of the parameters' names in the folder. Empty: the names are as in torchtitan, and the folder
            gets no position.json, so only `titanlab import` can read it.

    Raises:
        ConfigError: the checkpoint is damaged.
        OSError: the disk is full.
    """
    contents = read_contents(checkpoint, "run")
    state: dict[str, Any] = dict(contents.objects)
    written: dict[str, str] = {}
    for name, entry in contents.tensors.items():
        plain = name.removeprefix(PREFIXES[0])
        renamed = name if plain == name else prefix + plain
        written[renamed] = name
        state[renamed] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(into),
                planner=_ReadingPlanner(contents, written),
                no_dist=True,
            )
        except dcp.CheckpointException as error:
            # One process writes, so there is only one failure. On a full disk native code raises a RuntimeError.
            failure: BaseException = next((failure for failure, _ in error.failures.values()), error)
            raise ((refusal(into) if isinstance(failure, RuntimeError) else None) or failure) from error
    if prefix != PREFIXES[0]:
        return
    files = {path.name: path.stat().st_size for path in sorted(into.iterdir())}
    saved = structs.replace(contents.saved, files=files, generators={})
    write_bytes(into / POSITION, position_bytes(saved), durable=True)

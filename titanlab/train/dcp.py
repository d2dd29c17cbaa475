"""Weights in checkpoints of titanlab, and folders of torch.distributed.checkpoint: read as data, and written.

`export --format dcp` and torchtitan write such folders.

`.metadata` is a pickle, a program that can call functions of any module, and `FileSystemReader.read_metadata` runs it.
A folder may come from an untrusted source. Here every name in the pickle becomes a class that records its arguments,
and names that are not on the list are refused. Nothing is imported, and the pickle can change only classes that exist
for one reading. Then the type and range of each value are checked. This can go when torch's checkpoints have no pickle.
"""

from __future__ import annotations

import io
import operator
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titanlab.checkpoint import (
    ITEM_BYTES,
    METADATA,
    POSITION,
    WITHOUT_GROUP,
    DamagedCheckpoint,
    Place,
    Reader,
    SavedPosition,
    check_files,
    earlier_hint,
    load_state,
    metadata_of,
    position_bytes,
    read_contents,
    read_position,
)
from titanlab.errors import ConfigError
from titanlab.system import refusal, write_bytes
from titanlab.techniques.model.contract import ModelConfig
from titanlab.train.weights import DTYPES, Biases, TensorEntry, WeightsSource, biases_of

# The metadata of a checkpoint of 405B parameters over 512 ranks has about a fifth of this size.
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
        # The path of the checkpoint; the module's name depends on the version of Python.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        # Python before 3.12 writes a member of an enumeration as getattr(class, name). Nothing calls it here.
        ("builtins", "getattr"),
    ]
)


class _Unreadable(ValueError):
    """The bytes are not those of a checkpoint's metadata."""


class _Recorded:
    """Stands for an object that a pickle would create; a name that is not called, such as a dtype, stays a class.

    Attributes:
        name: of the class or function, without its module.
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
        """Called by every opcode that imports."""
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
    """The place of an entry's bytes, with the attributes that torch's reader needs."""

    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: None = None


class _Whole(msgspec.Struct):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    version: str | None = None


def read_saved(checkpoint: Path, key: str) -> Metadata:
    """Read the metadata of a folder without running code in it.

    Raises:
        DamagedCheckpoint: the file is missing, damaged, too large, or asks for a name that no checkpoint needs.
    """
    path = checkpoint / METADATA
    try:
        if not path.is_file():
            raise _Unreadable("is missing" if not path.exists() else "is not a file")
        if path.stat().st_size > MOST_BYTES:
            raise _Unreadable(f"has {path.stat().st_size} bytes, and {MOST_BYTES} are the most")
        content = path.read_bytes()
        return _metadata(_Unpickler(content).load(), most_chunks=len(content))
    except _Unreadable as error:
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} {error}", _CURE) from error
    except OSError as error:
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} cannot be read ({error.strerror})", _CURE) from error
    except Exception as error:
        # Damaged bytes can be any opcodes and values, which can raise any exception.
        reason = str(error) if isinstance(error, msgspec.ValidationError) else type(error).__name__
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} is damaged ({reason})", _CURE) from error


def _metadata(root: object, *, most_chunks: int) -> Metadata:
    whole = msgspec.convert(root, _Whole, from_attributes=True)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in whole.state_dict_metadata.items():
        if isinstance(entry, _Recorded) and entry.name == "BytesStorageMetadata":
            entries[name] = BytesStorageMetadata()
            continue
        tensor = msgspec.convert(entry, _Tensor, from_attributes=True)
        most_chunks -= len(tensor.chunks)
        if most_chunks < 0:
            # In a pickle many entries can share one list, so a small file could take hours to read.
            raise _Unreadable("is damaged (it has more chunks than bytes)")
        for chunk in tensor.chunks:
            ends = map(operator.add, chunk.offsets, chunk.sizes)
            is_alike = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            if not is_alike or any(end > whole for end, whole in zip(ends, tensor.size, strict=True)):
                raise _Unreadable(f"is damaged (a chunk lies outside of {name!r})")
        # The dtype is the first property; the others are the same for all tensors.
        dtype = tensor.properties.state[0].name
        if dtype not in ITEM_BYTES:
            raise _Unreadable("is damaged (it lacks a dtype)")
        entries[name] = metadata_of(dtype, tensor.size, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
    places = {}
    for index, place in whole.storage_data.items():
        at = msgspec.convert(index, _Index, from_attributes=True)
        stored = msgspec.convert(place, _StoredAt, from_attributes=True)
        file = stored.relative_path
        # The file is opened later: it must be inside the checkpoint's folder. PurePath accepts ".." as a name.
        if file in ("", "..") or PurePath(file).name != file or "\0" in file:
            raise _Unreadable("is damaged (it lacks the name of a file beside it)")
        places[MetadataIndex(at.fqn, at.offset, at.index)] = stored
    return Metadata(state_dict_metadata=entries, storage_data=places, version=whole.version)


@dataclass(frozen=True, kw_only=True)
class DcpContents:
    """A folder of `export --format dcp`, as `checkpoint.load_from` and `init_from` read it; see `Readable`."""

    saved: SavedPosition
    metadata: Metadata

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.metadata.state_dict_metadata)

    def reader(self, checkpoint: Place, key: str) -> DcpReader:
        assert isinstance(checkpoint, Path)
        return DcpReader(checkpoint, self.metadata, key)


def dcp_contents(checkpoint: Path, key: str) -> DcpContents:
    """The contents of a folder of `export --format dcp`; see `contents_of`."""
    cure = earlier_hint(checkpoint)
    saved = read_position(checkpoint, key, cure=cure)
    check_files(checkpoint, saved.files, key, cure=cure)
    return DcpContents(saved=saved, metadata=read_saved(checkpoint, key))


class DcpReader(Reader, dcp.FileSystemReader):
    """Reads a folder whose `.metadata` was read as data, and reports faults of the files as ConfigError."""

    checkpoint: Path

    def __init__(self, checkpoint: Path, metadata: Metadata, key: str) -> None:
        super().__init__(checkpoint)
        self.checkpoint, self.named_by, self._metadata = checkpoint, key, metadata

    def decode(self, content: io.BytesIO) -> Any:
        return torch.load(content, weights_only=True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata; FileSystemReader would call pickle.load."""
        return replace(self._metadata, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read as FileSystemReader does, with weights_only=True for tensors.

        Raises:
            DamagedCheckpoint: a file is missing or damaged, or asks for a name that no tensor needs; errors of the
                machine pass unchanged.
        """
        try:
            return super().read_data(plan, planner)
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                raise
            raise self._unreadable(f"it has no file {Path(str(error.filename)).name}") from error
        except Exception as error:
            # Damaged bytes can raise any exception; torch's message about a refused name has ten lines.
            reason = f"{type(error).__name__}: a file is damaged, or asks for more than tensors"
            raise self._unreadable(reason) from error

    def _unreadable(self, reason: str) -> DamagedCheckpoint:
        hint = earlier_hint(self.checkpoint)
        return DamagedCheckpoint(self.named_by, self.checkpoint, f"cannot be read ({reason})", hint)


# Prefixes of parameters' names: in titanlab's checkpoints, and in torchtitan's.
PREFIXES = ("model.", "")


def run_source(checkpoint: Place, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a checkpoint of titanlab.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """
    contents = read_contents(checkpoint, key)
    reader = contents.reader(checkpoint, key)
    biases = biases_of(model, contents.saved.position.routing, key, checkpoint)
    return _source(reader, PREFIXES[0], model, biases)


def dcp_source(folder: Path, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a folder of torch.distributed.checkpoint; its pickle is read as data.

    Args:
        model: config of the model that was saved; the folder has none.

    Raises:
        ConfigError: as `run_source`, or a parameter has another shape.
    """
    reader = DcpReader(folder, read_saved(folder, key), key)
    shapes, saved = model.account().parameters, reader.read_metadata().state_dict_metadata
    prefix = next((prefix for prefix in PREFIXES if any(f"{prefix}{name}" in saved for name in shapes)), None)
    if prefix is None:
        first, there = next(iter(shapes)), sorted(saved)[:3]
        rule = f"has no parameter of the model, such as {first} or model.{first}; "
        rule += f"it has {', '.join(there) or 'nothing'}"
        raise ConfigError(key, folder, rule, "give the --model that was saved")
    source = _source(reader, prefix, model, {})
    for name, shape in shapes.items():
        if source.entries[name].shape != tuple(shape):
            rule = f"{name} is {list(source.entries[name].shape)} there and {list(shape)} in the model"
            raise ConfigError(key, folder, rule, "give the --model that was saved")
    return source


def _source(reader: Reader, prefix: str, model: ModelConfig, biases: Biases) -> CheckpointSource:
    names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
    entries, saved = {}, reader.read_metadata().state_dict_metadata
    for name in model.account().parameters:
        tensor = saved.get(f"{prefix}{name}")
        if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype not in names:
            rule = f"has no plain tensor {name}"
            raise ConfigError(reader.named_by, reader.checkpoint, rule, "give a checkpoint of the same model")
        entries[name] = TensorEntry(dtype=names[tensor.properties.dtype], shape=tuple(tensor.size))
    return CheckpointSource(model=model, entries=entries, biases=biases, reader=reader, prefix=prefix)


@dataclass(frozen=True, kw_only=True)
class CheckpointSource(WeightsSource):
    """The weights in a checkpoint; it needs no process group.

    Attributes:
        prefix: of the parameters' names.
    """

    reader: Reader
    prefix: str
    # The parameter that was read last: its name and the whole tensor.
    last: dict[str, Tensor] = field(default_factory=dict)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name not in self.last:
            # Free the previous tensor before the next is allocated.
            self.last.clear()
            entry = self.entries[name]
            whole = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
            load_state({f"{self.prefix}{name}": whole}, self.reader)
            self.last[name] = whole
        box: Tensor = self.last[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Plans by shapes alone; reads each tensor only when it is written.

    Args:
        names: name of each tensor in the checkpoint, by its name in the folder that is written.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader, self._names = reader, names

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A tensor or object of the state, by its name."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, torch.Tensor):
            return value
        whole = torch.empty(value.shape, dtype=value.dtype)
        load_state({self._names[index.fqn]: whole}, self._reader)
        return whole


def write_dcp(checkpoint: Place, into: Path, key: str, *, prefix: str = PREFIXES[0]) -> None:
    """Write `.metadata`, `*.distcp` and `position.json` into a new folder.

    The names of the entries are `model.…` and `optimizer.state.….…`. The folder can be given to
    `checkpoint.load_from`; it has no states of generators.

    Args:
        prefix: of the parameters' names; empty: as torchtitan names them. A folder without a prefix has no
            position.json, and `titanlab import` reads it.

    Raises:
        ConfigError: the checkpoint is damaged.
        OSError: the disk is full.
    """
    contents = read_contents(checkpoint, key)
    reader = contents.reader(checkpoint, key)
    state: dict[str, Any] = dict(contents.entries.objects)
    written: dict[str, str] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            plain = name.removeprefix(PREFIXES[0])
            renamed = name if plain == name else prefix + plain
            written[renamed] = name
            state[renamed] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=WITHOUT_GROUP)
        try:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(into),
                planner=_ReadingPlanner(reader, written),
                no_dist=True,
            )
        except dcp.CheckpointException as error:
            # One process writes, so there is one failure; if the disk is full, native code raises a RuntimeError.
            failure: BaseException = next((failure for failure, _ in error.failures.values()), error)
            raise ((refusal(into) if isinstance(failure, RuntimeError) else None) or failure) from error
    if prefix != PREFIXES[0]:
        return
    files = {path.name: path.stat().st_size for path in sorted(into.iterdir())}
    saved = structs.replace(contents.saved, files=files, generators={})
    write_bytes(into / POSITION, position_bytes(saved), durable=True)

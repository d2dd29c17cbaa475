"""A folder of torch.distributed.checkpoint, which `export --format dcp` and torchtitan write: its `.metadata`, as data.

The file is a pickle, a program that can call functions of any module, and `FileSystemReader.read_metadata` runs it. A
folder may come from an untrusted source. Here every name in a pickle becomes a class of this module that records its
arguments, and names that are not on the list are refused. Nothing is imported, torch included, and the pickle can
change only classes that exist for one reading. Then the type and range of each value are checked. This can go when
torch's checkpoints have no pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from titanlab.checkpoint import (
    ITEM_BYTES,
    METADATA,
    DamagedCheckpoint,
    Place,
    Readable,
    SavedPosition,
    check_files,
    earlier_hint,
    has_pickle,
    read_contents,
    read_position,
)

if TYPE_CHECKING:
    from titanlab.train.dcp_tensors import DcpReader

# The metadata of a checkpoint of 405B parameters over 512 ranks has about a fifth of this size.
MOST_BYTES = 1 << 30
_CURE = "give a checkpoint that titanlab has saved, from a source that you trust"

_TYPES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
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


class UnreadablePickle(ValueError):
    """The bytes are not a pickle, or it asks for a name that its reader does not expect."""


class Inert:
    """Records how a pickle would make an object: the constructor's arguments and the state.

    Attributes:
        name: module and name of the class or function, joined by a dot.
        state: argument of `__setstate__`; None: it is not called.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Record the arguments."""
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_inert(content: bytes, names: Collection[tuple[str, str]]) -> Any:
    """Read a pickle: plain values, and an `Inert` in place of every other object.

    A name that is not called, such as that of a dtype, becomes a subclass of Inert.

    Args:
        names: pairs of module and name that the pickle may ask for.

    Raises:
        UnreadablePickle: the pickle asks for another name, or is damaged.
    """
    try:
        return _Unpickler(content, names).load()
    except UnreadablePickle:
        raise
    except Exception as error:
        # Damaged bytes can be any opcodes, which can raise any exception.
        raise UnreadablePickle(f"is damaged ({type(error).__name__})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        """Called by every opcode that imports."""
        if (module, name) not in self._names:
            raise UnreadablePickle(f"asks for {module}.{name}, which could run code")
        # A new class for each reading, so that the pickle cannot change a class for later readings.
        return self._classes.setdefault((module, name), type("Named", (Inert,), {"name": f"{module}.{name}"}))


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a checkpoint.

    Attributes:
        size: shape of the full tensor.
        boxes: offsets and sizes of the saved parts.
    """

    dtype: str
    size: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class SavedPlace:
    """The place of an entry's bytes, with the attributes that torch's reader needs.

    Attributes:
        relative_path: the file's name in the checkpoint's folder.
        transform_descriptors: None: no compression.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The entries of a checkpoint.

    Attributes:
        places: by the entry's name, the chunk's offsets (None: not a tensor), and the chunk's number if it is known.
    """

    tensors: Mapping[str, SavedTensor]
    objects: frozenset[str]
    places: Mapping[tuple[str, tuple[int, ...] | None, int | None], SavedPlace]
    version: str | None


@dataclass(frozen=True, kw_only=True)
class DcpContents:
    """A folder of `export --format dcp`, as `checkpoint.load_from` and `init_from` read it; see `Readable`."""

    saved: SavedPosition
    entries: SavedState

    @property
    def names(self) -> frozenset[str]:
        """The names of all entries."""
        return self.entries.objects | self.entries.tensors.keys()

    def reader(self, checkpoint: Place, key: str) -> DcpReader:
        # Imported here: it imports torch.
        from titanlab.train.dcp_tensors import DcpReader

        assert isinstance(checkpoint, Path)
        return DcpReader(checkpoint, self.entries, key)


def contents_of(checkpoint: Place, key: str) -> Readable:
    """The contents of a checkpoint of titanlab or of a folder of `export --format dcp`, as `read_contents` reads them.

    Raises:
        DamagedCheckpoint: it is damaged, or has a value that no run saves; or the folder is another tool's, which does
            not say where in the data it stands.
    """
    if not has_pickle(checkpoint):
        return read_contents(checkpoint, key)
    cure = earlier_hint(checkpoint)
    saved = read_position(checkpoint, key, cure=cure)
    check_files(checkpoint, saved.files, key, cure=cure)
    return DcpContents(saved=saved, entries=read_saved(checkpoint, key))


def read_saved(checkpoint: Path, key: str) -> SavedState:
    """Read the metadata of a folder without running code in it.

    Raises:
        DamagedCheckpoint: the file is missing, damaged, too large, or asks for a name that no checkpoint needs.
    """
    path = checkpoint / METADATA
    try:
        if not path.is_file():
            raise UnreadablePickle("is missing" if not path.exists() else "is no file")
        if path.stat().st_size > MOST_BYTES:
            raise UnreadablePickle(f"has {path.stat().st_size} bytes, and {MOST_BYTES} are the most")
        content = path.read_bytes()
        return _state(read_inert(content, _NAMES), most_chunks=len(content))
    except (UnreadablePickle, OSError) as error:
        reason = str(error) if isinstance(error, UnreadablePickle) else f"cannot be read ({error.strerror})"
        raise DamagedCheckpoint(key, checkpoint, f"its {METADATA} {reason}", _CURE) from error


def _state(node: Any, *, most_chunks: int) -> SavedState:
    state = _fields(node, f"{_TYPES}.Metadata")
    tensors: dict[str, SavedTensor] = {}
    objects: set[str] = set()
    for name, entry in _mapping(state.get("state_dict_metadata")).items():
        if _is(entry, f"{_TYPES}.BytesStorageMetadata"):
            objects.add(_text(name))
            continue
        tensors[_text(name)] = tensor = _tensor(entry)
        most_chunks -= len(tensor.boxes)
        if most_chunks < 0:
            # In a pickle many entries can share one list, so a small file could take hours to read.
            raise UnreadablePickle("is damaged (it has more chunks than bytes)")
    places = {_index(index): _place(place) for index, place in _mapping(state.get("storage_data")).items()}
    version = state.get("version")
    return SavedState(
        tensors=tensors,
        objects=frozenset(objects),
        places=places,
        version=None if version is None else _text(version),
    )


def _tensor(node: Any) -> SavedTensor:
    state = _fields(node, f"{_TYPES}.TensorStorageMetadata")
    size, dtype = _size(state.get("size")), _dtype(state.get("properties"))
    chunks = state.get("chunks")
    if not isinstance(chunks, list):
        raise UnreadablePickle("is damaged (it lacks a list of chunks)")
    return SavedTensor(dtype=dtype, size=size, boxes=tuple(_chunk(chunk, size) for chunk in chunks))


def _dtype(node: Any) -> str:
    """The name of the dtype in a tensor's properties; the other properties are the same for all tensors."""
    _expect(_is(node, f"{_TYPES}.TensorProperties") and isinstance(node.state, tuple), "properties of a tensor")
    dtype = node.state[0] if node.state else None
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, type) and issubclass(dtype, Inert) else ""
    _expect(name in ITEM_BYTES, "a dtype")
    return name


def _chunk(node: Any, size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    state = _fields(node, f"{_TYPES}.ChunkStorageMetadata")
    offsets, sizes = _size(state.get("offsets")), _size(state.get("sizes"))
    _expect(len(offsets) == len(sizes) == len(size), "a chunk of its tensor's dimensions")
    inside = all(at + extent <= whole for at, extent, whole in zip(offsets, sizes, size, strict=True))
    _expect(inside, "a chunk inside of its tensor")
    return offsets, sizes


def _index(node: Any) -> tuple[str, tuple[int, ...] | None, int | None]:
    state = _fields(node, f"{_TYPES}.MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return (
        _text(state.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _place(node: Any) -> SavedPlace:
    state = _fields(node, f"{_FILES}._StorageInfo")
    file = _text(state.get("relative_path"))
    # This file is opened later: it must be inside the checkpoint's folder.
    # PurePath takes ".." for a name too.
    is_name = file not in ("", "..") and PurePath(file).name == file and "\0" not in file
    _expect(is_name, "the name of a file beside it")
    _expect(not state.get("transform_descriptors"), "bytes that are not compressed")
    return SavedPlace(relative_path=file, offset=_count(state.get("offset")), length=_count(state.get("length")))


def _fields(node: Any, name: str) -> Mapping[str, Any]:
    _expect(_is(node, name), name.rpartition(".")[2])
    return _mapping(node.state)


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Inert) and node.name == name


def _mapping(node: Any) -> Mapping[Any, Any]:
    _expect(isinstance(node, dict), "a mapping")
    mapping: Mapping[Any, Any] = node
    return mapping


def _size(node: Any) -> tuple[int, ...]:
    _expect(_is(node, "torch.Size") and len(node.args) == 1 and isinstance(node.args[0], tuple), "a size")
    return tuple(map(_count, node.args[0]))


def _count(node: Any) -> int:
    _expect(type(node) is int and 0 <= node < 1 << 63, "a count")
    return int(node)


def _text(node: Any) -> str:
    _expect(type(node) is str, "a text")
    return str(node)


def _expect(condition: object, wanted: str) -> None:
    if not condition:
        raise UnreadablePickle(f"is damaged (it lacks {wanted})")

"""The `.metadata` of an older checkpoint, read without torch and without running its code.

torch.distributed.checkpoint writes this file as a pickle: `FileSystemReader.read_metadata` calls `pickle.load`, which
runs any code in the file. A checkpoint may come from an untrusted source, so its pickle is read as data
(`inert_pickle`), and the type and range of each value are checked. This can go when torch's checkpoints have no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from titanlab.checkpoint.blocks import DamagedCheckpoint
from titanlab.checkpoint.older.inert_pickle import Inert, UnreadablePickle, read_inert

METADATA = ".metadata"
# The metadata of a checkpoint of 405B parameters over 512 ranks has about a fifth of this size.
MOST_BYTES = 1 << 30
_CURE = "give a checkpoint that titanlab has saved, from a source that you trust"

_TYPES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_NAMES = frozenset(
    [
        *((_TYPES, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_TYPES, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
        (_TYPES, "_MEM_FORMAT_ENCODING"),
        (_FILES, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in DTYPES),
        # The path of the checkpoint; the module's name depends on the version of Python.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
        # Python before 3.12 writes a member of an enumeration as getattr(class, name). Nothing calls it here.
        ("builtins", "getattr"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in a checkpoint.

    Attributes:
        dtype: its name in `torch`.
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
        offset, length: in bytes.
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
        tensors: by name.
        objects: names of the entries that are not tensors.
        places: by the entry's name, the chunk's offsets (None: not a tensor), and the chunk's number if it is known.
        version: of the format.
    """

    tensors: Mapping[str, SavedTensor]
    objects: frozenset[str]
    places: Mapping[tuple[str, tuple[int, ...] | None, int | None], SavedPlace]
    version: str | None

    @property
    def names(self) -> frozenset[str]:
        """The names of all entries."""
        return self.objects | self.tensors.keys()


def read_saved(checkpoint: Path, key: str) -> SavedState:
    """Read a checkpoint's metadata without running code in it.

    Args:
        checkpoint: folder of one step.
        key: for errors.

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
    _expect(name in DTYPES, "a dtype")
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

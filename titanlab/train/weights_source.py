"""Sources of a model's tensors, which read one box of a tensor at a time and no more."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlab.checkpoint.contents import read_contents
from titanlab.checkpoint.older.metadata import read_saved
from titanlab.checkpoint.older.reader import PickledReader
from titanlab.checkpoint.reader import Reader, read_into, reader_of
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.system.foreign import LFS_POINTER, Foreign
from titanlab.train.initialise import local_part, plain_name
from titanlab.train.starting_weights import Biases, biases_of
from titanlab.train.weights_folder import SafetensorsWriter, index_of, split_in_files, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


# Number formats of weights that are not quantised, by their names in safetensors.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_WHOLE = "fetch the folder again, whole"
CHUNK_BYTES = 1 << 26
"""Bytes of a tensor that are read, changed and written at a time."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor on disk: its number format, named as in safetensors, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return BYTES[self.dtype] * math.prod(self.shape)


class Source(Protocol):
    """A model's weights."""

    @property
    def model(self) -> ModelConfig:
        """Config of the model."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every parameter by titanlab's name, in the model's order."""
        ...

    @property
    def biases(self) -> Biases:
        """Biases of the routers; empty: there are none."""
        ...

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of one parameter, with rows in titanlab's order, on the CPU, in the dtype of the source."""
        ...


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource:
    """Weights in safetensors files of titanlab or of another library.

    Attributes:
        model, entries: as in Source.
        files: the file of each tensor, by the tensor's name.
        foreign: name and order of rows in the files, by titanlab's name.
        about: other values of the folder's config: `max_position_embeddings`, ids of special tokens.
        digest: hash of the content; empty if it is not known.
        copies: tensors that must equal another tensor and are not read: name → the other's name, both in the files.
        biases: as in Source.
        wrapped: names of tensors in the files, where those differ from the names in `foreign`.
        not_read: a line for each kind of weights in the folder that is left aside.
    """

    model: ModelConfig
    entries: Mapping[str, Entry]
    files: Mapping[str, Path]
    foreign: Mapping[str, Foreign]
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    biases: Biases = field(default_factory=dict)
    wrapped: Mapping[str, str] = field(default_factory=dict)
    not_read: Sequence[str] = ()

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """As in Source."""
        stored = self.foreign[name]
        if stored.stack:
            return self._read_stack(stored.stack, offsets, sizes)
        first, last = offsets[0], offsets[0] + sizes[0]
        columns = [slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True)]
        # The file is closed after each read, because its mapped pages count as this process's memory.
        with safe_open(self.files[stored.name], framework="pt") as file:
            tensor = file.get_slice(self.wrapped.get(stored.name, stored.name))
            if not stored.head or not math.prod(sizes):
                return cast("Tensor", tensor[(slice(first, last), *columns)])
            begin, end = first // stored.head * stored.head, -(-last // stored.head) * stored.head
            heads = cast("Tensor", tensor[(slice(begin, end), *columns)])
            return in_pairs(heads, stored.head)[first - begin : last - begin]

    def _read_stack(self, names: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a stack of tensors."""
        import torch

        inside = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
        parts = []
        for name in names[offsets[0] : offsets[0] + sizes[0]]:
            with safe_open(self.files[name], framework="pt") as file:
                parts.append(cast("Tensor", file.get_slice(self.wrapped.get(name, name))[inside]))
        return torch.stack(parts) if parts else torch.empty(*sizes)


def usual_dtype(source: Source) -> str:
    """The number format that most of a source's tensors have."""
    kinds = [entry.dtype for entry in source.entries.values()]
    return DTYPES[max(sorted(set(kinds)), key=kinds.count)]


def in_pairs(rows: Tensor, head: int) -> Tensor:
    """Order the rows of every head as 0, head/2, 1, head/2 + 1, …: [heads · head, …] → the same shape."""
    pairs: Tensor = rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
    return pairs


def in_halves(rows: Tensor, head: int) -> Tensor:
    """The inverse of `in_pairs`."""
    halves: Tensor = rows.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halves


def chunks(entry: Entry, *, rows: int = 1) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of boxes that together make up a tensor, each of full rows and about CHUNK_BYTES at most.

    Args:
        entry: the tensor.
        rows: number of rows that must stay together.
    """
    width = entry.nbytes // max(entry.shape[0], 1)
    step = max(CHUNK_BYTES // max(width * rows, 1), 1) * rows
    for start in range(0, entry.shape[0], step):
        size = min(step, entry.shape[0] - start)
        yield [start] + [0] * (len(entry.shape) - 1), [size, *entry.shape[1:]]


def read_entries(files: Mapping[Path, Collection[str] | None], key: str) -> tuple[dict[str, Entry], dict[str, Path]]:
    """Tensors in safetensors files by name, and the file of each; does not import torch.

    Args:
        files: the names of the tensors to read of each file; None: all.
        key: for errors.

    Raises:
        ConfigError: a file is missing, damaged or no regular file, or lacks a tensor.
    """
    entries: dict[str, Entry] = {}
    places: dict[str, Path] = {}
    for path, wanted in files.items():
        if path.exists() and not path.is_file():
            # To open a named pipe would wait for a writer.
            raise ConfigError(key, path, "is no regular file", "fetch the file again")
        try:
            with safe_open(path, framework="np") as file:
                there = set(file.keys())
                for name in sorted(there) if wanted is None else wanted:
                    if name not in there:
                        raise ConfigError(key, path, f"lacks {name}, which the index places in it", _WHOLE)
                    tensor = file.get_slice(name)
                    entries[name] = Entry(dtype=str(tensor.get_dtype()), shape=tuple(tensor.get_shape()))
                    places[name] = path
        except (SafetensorError, OSError) as error:
            if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
                rule = "is a pointer of Git LFS, and not the file"
                raise ConfigError(key, path, rule, "run `git lfs pull` in its repository") from error
            reason = "is missing" if not path.exists() else f"cannot be read ({' '.join(str(error).split())[:80]})"
            raise ConfigError(key, path, reason, "fetch the file again") from error
    return entries, places


def check_entries(place: Path, key: str, expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]) -> None:
    """Check that a folder has exactly the expected tensors, in formats of `DTYPES`.

    Raises:
        ConfigError: a tensor is missing, has another shape, is not expected, or is quantised.
    """
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            rule = f"{name} is kept as {entry.dtype}, which is no format of plain weights"
            raise ConfigError(key, place, rule, f"give weights in {', '.join(DTYPES.values())}")
    for name in [*expected, *entries]:
        shape, actual = expected.get(name), entries[name].shape if name in entries else None
        if shape != actual:
            rule = f"its config and its tensors disagree: {name} is {_shape(actual)}, not {_shape(shape)}"
            raise ConfigError(key, place, rule, _WHOLE)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(map(str, shape)) or "a single number"


# Before the names of parameters: in titanlab's checkpoints, and in those of torchtitan.
PREFIXES = ("model.", "")


def run_source(checkpoint: Place, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a checkpoint of titanlab.

    Args:
        checkpoint: folder of one step.
        model: config of the run's model.
        key: for errors.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """
    contents = read_contents(checkpoint, key)
    reader = reader_of(checkpoint, contents, key)
    biases = biases_of(model, contents.saved.position.routing, key, checkpoint)
    return CheckpointSource(reader, reader.read_metadata(), PREFIXES[0], model, biases)


def dcp_source(folder: Path, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a folder of torch.distributed.checkpoint; its pickle is read as data.

    Args:
        model: config of the model that was saved; the folder has none.

    Raises:
        ConfigError: as `run_source`, or a parameter has another shape.
    """
    reader = PickledReader(folder, read_saved(folder, key), key)
    metadata = reader.read_metadata()
    shapes = model.account().parameters
    saved = metadata.state_dict_metadata
    prefix = next((prefix for prefix in PREFIXES if any(f"{prefix}{name}" in saved for name in shapes)), None)
    if prefix is None:
        first, there = next(iter(shapes)), sorted(saved)[:3]
        rule = f"has no parameter of the model, as {first} or model.{first}; it has {', '.join(there) or 'nothing'}"
        raise ConfigError(key, folder, rule, "give the --model that was saved")
    source = CheckpointSource(reader, metadata, prefix, model)
    for name, shape in shapes.items():
        if source.entries[name].shape != tuple(shape):
            rule = f"{name} is {list(source.entries[name].shape)} there and {list(shape)} in the model"
            raise ConfigError(key, folder, rule, "give the --model that was saved")
    return source


class CheckpointSource:
    """A Source that needs no process group.

    Args:
        metadata: of the reader. It is read once: that of a run on hundreds of ranks has 100,000 entries.
        prefix: before the names of parameters.
        model: config of the model.
        biases: of its routers.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """

    def __init__(
        self, reader: Reader, metadata: Metadata, prefix: str, model: ModelConfig, biases: Biases | None = None
    ) -> None:
        self.model = model
        self.biases: Biases = biases or {}
        self.entries: dict[str, Entry] = {}
        self._name, self._whole = "", torch.empty(0)
        self._reader, self._metadata, self._prefix = reader, metadata, prefix
        names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
        for name in model.account().parameters:
            tensor = metadata.state_dict_metadata.get(f"{prefix}{name}")
            if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype not in names:
                rule = f"has no plain tensor {name}"
                raise ConfigError(reader.named_by, reader.checkpoint, rule, "give a checkpoint of the same model")
            self.entries[name] = Entry(dtype=names[tensor.properties.dtype], shape=tuple(tensor.size))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """As in Source."""
        if name != self._name:
            # Free the previous tensor before the next is allocated.
            self._name, self._whole = "", torch.empty(0)
            entry = self.entries[name]
            whole = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
            read_into({f"{self._prefix}{name}": whole}, self._reader, self._metadata)
            self._name, self._whole = name, whole
        box: Tensor = self._whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box


def write_weights(
    source: Source,
    folder: Path,
    *,
    stem: str,
    index: str,
    foreign: Mapping[str, Foreign],
    dtype: str | None,
    shard_bytes: int,
) -> str:
    """Write all tensors of a source into files of a bounded size, with an index if there are several.

    Args:
        source: read piece by piece, in the order of its entries.
        folder: the folder to write into.
        stem: beginning of the file names.
        index: name of the index.
        foreign: name and order of rows of each parameter in the files.
        dtype: number format, such as `bfloat16`; None keeps the format of each tensor.
        shard_bytes: largest size of a file.

    Returns:
        SHA-256 over names, shapes, formats and contents of all tensors; the same for any `shard_bytes`.

    Raises:
        ConfigError: a number is too large for the format.
    """
    format_name = next((name for name, torch_name in DTYPES.items() if torch_name == dtype), None)
    entries = {
        theirs: Entry(dtype=format_name or entry.dtype, shape=foreign[name].shape_there(entry.shape))
        for name, entry in source.entries.items()
        for theirs in foreign[name].names
    }
    # The parameter of each tensor, and the tensor's number in a stack.
    ours = {theirs: (name, n) for name in source.entries for n, theirs in enumerate(foreign[name].names)}
    files = split_in_files(entries, most=shard_bytes, stem=stem)
    hashes = []
    for file, names in files.items():
        with SafetensorsWriter(folder / file, {name: entries[name] for name in names}) as writer:
            for name in names:
                parameter, number = ours[name]
                head, is_stack = foreign[parameter].head, bool(foreign[parameter].stack)
                digest = hashlib.sha256()
                here = Entry(dtype=source.entries[parameter].dtype, shape=entries[name].shape)
                for offsets, sizes in chunks(here, rows=max(head, 1)):
                    if is_stack:
                        piece = source.read(parameter, [number, *offsets], [1, *sizes])[0]
                    else:
                        piece = source.read(parameter, offsets, sizes)
                    piece = _cast(piece, torch_dtype(entries[name].dtype), parameter)
                    digest.update(writer.write(in_halves(piece, head) if head else piece))
                hashes.append([name, entries[name].dtype, list(entries[name].shape), digest.hexdigest()])
    if len(files) > 1:
        (folder / index).write_text(json.dumps(index_of(entries, files), indent=2) + "\n", encoding="utf-8")
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def _cast(piece: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if piece.dtype == dtype:
        return piece
    cast = piece.to(dtype)
    if dtype is torch.float16 and bool((cast.isinf() & piece.isfinite()).any()):
        raise ConfigError("--dtype", "float16", f"{name} has numbers beyond its 65,504", "try bfloat16")
    return cast


@torch.no_grad()
def fill(model: nn.Module, source: Source) -> None:
    """Copy every parameter of `model` from a source, in place, cast to the parameter's dtype.

    Args:
        model: materialised; parameters are plain tensors or DTensors of any placement. It may be a pipeline stage:
            parameters of other stages are not read.
        source: has the same names and full shapes; a rank reads only its part.
    """
    for name, parameter in model.named_parameters():
        local, offsets = local_part(parameter)
        if local.numel():
            _fill_box(local, offsets, plain_name(name), source)


def _fill_box(local: Tensor, offsets: Sequence[int], name: str, source: Source) -> None:
    width = local.numel() // local.shape[0] * local.element_size()
    step = max(CHUNK_BYTES // max(width, 1), 1)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        part.copy_(source.read(name, [offsets[0] + start, *offsets[1:]], list(part.shape)))

"""Tensors of weights, a piece at a time: out of a checkpoint, into a model, into safetensors files.

The format (safetensors' own description): eight bytes with the header's length, little-endian; the header, JSON with
dtype, shape and offsets of each tensor, padded with spaces to a multiple of eight; then the tensors, one after another.
The library's `save_file` needs all tensors of a file at once; `SafetensorsWriter` has one piece in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlab.checkpoint import Place, Reader, read_contents, read_into
from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign, ModelConfig
from titanlab.train.dcp import DcpReader, read_saved
from titanlab.train.initialise import local_part, plain_name
from titanlab.train.weights_folder import (
    DTYPES,
    Biases,
    TensorEntry,
    WeightsSource,
    biases_of,
    chunks,
    in_halves,
)

_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes one file; use it in a `with` block, and write every tensor in the order of `entries`, in pieces."""

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, entry in entries.items():
            header[name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._left = offset
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, piece: Tensor) -> memoryview:
        """Add the next elements. Returns their bytes."""
        content = piece.contiguous().flatten().view(torch.uint8).numpy().data
        self._file.write(content)
        self._left -= len(content)
        return content

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._left:
            raise RuntimeError(f"{self._left} bytes of {self._file.name} were not written")


def split_in_files(entries: Mapping[str, TensorEntry], *, most: int, stem: str) -> dict[str, list[str]]:
    """Names of the tensors of each file, in order: `<stem>-00001-of-00003.safetensors`, or one file without numbers.

    Args:
        most: largest size of a file in bytes; a larger tensor gets a file of its own.
    """
    groups: list[list[str]] = []
    size = 0
    for name, entry in entries.items():
        if not groups or size + entry.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entry.nbytes
    count = len(groups)
    if count == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{number:05d}-of-{count:05d}.safetensors": names for number, names in enumerate(groups, start=1)}


def index_of(entries: Mapping[str, TensorEntry], files: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """The index of the tensors of several files, in Hugging Face's format."""
    return {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a number format that is named as in safetensors."""
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


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
    return _source(reader, reader.read_metadata(), PREFIXES[0], model, biases)


def dcp_source(folder: Path, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a folder of torch.distributed.checkpoint; its pickle is read as data.

    Args:
        model: config of the model that was saved; the folder has none.

    Raises:
        ConfigError: as `run_source`, or a parameter has another shape.
    """
    reader = DcpReader(folder, read_saved(folder, key), key)
    metadata = reader.read_metadata()
    shapes = model.account().parameters
    saved = metadata.state_dict_metadata
    prefix = next((prefix for prefix in PREFIXES if any(f"{prefix}{name}" in saved for name in shapes)), None)
    if prefix is None:
        first, there = next(iter(shapes)), sorted(saved)[:3]
        rule = f"has no parameter of the model, as {first} or model.{first}; it has {', '.join(there) or 'nothing'}"
        raise ConfigError(key, folder, rule, "give the --model that was saved")
    source = _source(reader, metadata, prefix, model, {})
    for name, shape in shapes.items():
        if source.entries[name].shape != tuple(shape):
            rule = f"{name} is {list(source.entries[name].shape)} there and {list(shape)} in the model"
            raise ConfigError(key, folder, rule, "give the --model that was saved")
    return source


def _source(reader: Reader, metadata: Metadata, prefix: str, model: ModelConfig, biases: Biases) -> CheckpointSource:
    names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
    entries = {}
    for name in model.account().parameters:
        tensor = metadata.state_dict_metadata.get(f"{prefix}{name}")
        if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype not in names:
            rule = f"has no plain tensor {name}"
            raise ConfigError(reader.named_by, reader.checkpoint, rule, "give a checkpoint of the same model")
        entries[name] = TensorEntry(dtype=names[tensor.properties.dtype], shape=tuple(tensor.size))
    return CheckpointSource(
        model=model, entries=entries, biases=biases, reader=reader, metadata=metadata, prefix=prefix
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSource(WeightsSource):
    """The weights in a checkpoint; it needs no process group.

    Attributes:
        metadata: of the reader; read once, because a run on hundreds of ranks has 100,000 entries.
        prefix: of the parameters' names.
    """

    reader: Reader
    metadata: Metadata
    prefix: str
    # The parameter that was read last: its name and the whole tensor.
    last: dict[str, Tensor] = field(default_factory=dict)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name not in self.last:
            # Free the previous tensor before the next is allocated.
            self.last.clear()
            entry = self.entries[name]
            whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            read_into({f"{self.prefix}{name}": whole}, self.reader, self.metadata)
            self.last[name] = whole
        box: Tensor = self.last[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box


def write_weights(
    source: WeightsSource,
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
        foreign: name and order of rows of each parameter in the files.
        dtype: number format, such as `bfloat16`; None keeps the format of each tensor.

    Returns:
        SHA-256 over names, shapes, formats and contents of all tensors; the same for any `shard_bytes`.

    Raises:
        ConfigError: a number is too large for the format.
    """
    format_name = next((name for name, torch_name in DTYPES.items() if torch_name == dtype), None)
    entries = {
        theirs: TensorEntry(dtype=format_name or entry.dtype, shape=foreign[name].shape_there(entry.shape))
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
                here = TensorEntry(dtype=source.entries[parameter].dtype, shape=entries[name].shape)
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
def fill(model: nn.Module, source: WeightsSource) -> None:
    """Copy every parameter of `model` from a source, in place, cast to the parameter's dtype.

    Args:
        model: materialised; parameters are plain tensors or DTensors of any placement. It may be a pipeline stage:
            parameters of other stages are not read.
        source: has the same names and full shapes; a rank reads only its part.
    """
    for name, parameter in model.named_parameters():
        local, offsets = local_part(parameter)
        if not local.numel():
            continue
        plain = plain_name(name)
        for start, sizes in chunks(TensorEntry(dtype=source.entries[plain].dtype, shape=tuple(local.shape))):
            there = [offset + at for offset, at in zip(offsets, start, strict=True)]
            local[start[0] : start[0] + sizes[0]].copy_(source.read(plain, there, sizes))

"""Writing of safetensors files piece by piece, so that memory has one piece of a file of any size.

The format (safetensors' own description): eight bytes with the header's length, little-endian; the header, JSON with
dtype, shape and offsets of each tensor, padded with spaces to a multiple of eight; then the tensors, one after another.
The library's `save_file` needs all tensors of a file at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from titanlab.weights.source import DTYPES, Entry

_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes one file; use it in a `with` block, and write every tensor in the order of `entries`, in pieces.

    Args:
        path: must not exist.
        entries: tensors by name.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
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


def split_in_files(entries: Mapping[str, Entry], *, most: int, stem: str) -> dict[str, list[str]]:
    """Names of the tensors of each file, in order: `<stem>-00001-of-00003.safetensors`, or one file without numbers.

    Args:
        entries: tensors by name.
        most: largest size of a file in bytes; a larger tensor gets a file of its own.
        stem: beginning of the file names.
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


def index_of(entries: Mapping[str, Entry], files: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """The index of the tensors of several files, in Hugging Face's format."""
    return {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a number format that is named as in safetensors."""
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype

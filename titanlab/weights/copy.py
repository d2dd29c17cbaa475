"""Weights from any source into safetensors files, a piece at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from titanlab.errors import ConfigError
from titanlab.system.foreign import Foreign
from titanlab.weights.safetensors_writer import SafetensorsWriter, index_of, split_in_files, torch_dtype
from titanlab.weights.source import DTYPES, Entry, Source, chunks, in_halves


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

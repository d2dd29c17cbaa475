"""Sources of a model's tensors, which read one box of a tensor at a time and no more.

Biases of routers are no parameters: a checkpoint has them beside its tensors. Torch-free until a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from safetensors import SafetensorError, safe_open

from titanlab.costs.account import block_name
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.system.foreign import LFS_POINTER, Foreign

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
        inside = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
        import torch

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


Biases = Mapping[str, Sequence[float]]


"""By block (`layers.0`, …), the number that is added to each expert's probability for the choice."""


def biases_of(model: ModelConfig, routing: Biases, key: str, value: object) -> Biases:
    """The biases in the state of a balance; empty: the model's routers have none.

    Args:
        model: that the state was saved with. Of other balances than `bias` the state has no biases.
        key, value: where the state is from, for the error.

    Raises:
        ConfigError: it has other numbers of blocks or experts than the model.
    """
    account = model.account()
    if account.experts is None or account.experts.balance != "bias" or not routing:
        return {}
    names = [block_name(layer) for layer in range(account.layers)]
    if {*routing} != {*names} or any(len(routing[name]) != account.experts.count for name in names):
        rule = f"its biases are not those of {account.layers} blocks of {account.experts.count} experts"
        raise ConfigError(key, value, rule, "choose the model that it was trained as")
    return routing


def widest(biases: Biases) -> float:
    """The largest difference of two experts' biases in a block."""
    return max((max(block) - min(block) for block in biases.values()), default=0.0)


def left_out(biases: Biases) -> str:
    """One line for people whose copy of the weights has no place for the biases; empty: there are none."""
    if not widest(biases):
        return ""
    return (
        f"left out: the biases of {len(biases)} routers, for which the format has no place. Without them a token whose "
        f"experts' probabilities differ by less than {widest(biases):.2g} (the widest of a block) may get other experts"
    )

"""Where a model's tensors come from, one box at a time: nothing here holds more than it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from safetensors import SafetensorError, safe_open

from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.system.foreign import Foreign

if TYPE_CHECKING:
    from torch import Tensor

# Number formats by their names in safetensors; those that a model's weights have when nothing is quantised.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
CHUNK_BYTES = 1 << 26
"""Of a tensor that is read, changed and written at a time."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor on disk: number format as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return BYTES[self.dtype] * math.prod(self.shape)


class Source(Protocol):
    """A model's weights."""

    @property
    def model(self) -> ModelConfig:
        """Config of the model."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every parameter by our name, in the model's order."""
        ...

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of one parameter, in our order of rows, on the CPU, as it is kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource:
    """Weights in safetensors files, ours or another library's.

    Attributes:
        model, entries: as in Source.
        files: by the name that the tensor has in it.
        foreign: by our name.
        about: what else the folder says of the model: `max_position_embeddings`, ids of special tokens.
        digest: of the content, if it is known.
        copies: tensors in the files that must equal another one, by names in the files; nothing reads them.
    """

    model: ModelConfig
    entries: Mapping[str, Entry]
    files: Mapping[str, Path]
    foreign: Mapping[str, Foreign]
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """As in Source."""
        there = self.foreign[name]
        first, last = offsets[0], offsets[0] + sizes[0]
        columns = [slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True)]
        # A file is open only while it is read: its mapped pages count as this process's memory.
        with safe_open(self.files[there.name], framework="pt") as file:
            tensor = file.get_slice(there.name)
            if not there.head or not math.prod(sizes):
                return cast("Tensor", tensor[(slice(first, last), *columns)])
            begin, end = first // there.head * there.head, -(-last // there.head) * there.head
            heads = cast("Tensor", tensor[(slice(begin, end), *columns)])
            return in_pairs(heads, there.head)[first - begin : last - begin]


def usual_dtype(source: Source) -> str:
    """The number format that most of a source's tensors have."""
    kinds = [entry.dtype for entry in source.entries.values()]
    return DTYPES[max(sorted(set(kinds)), key=kinds.count)]


def in_pairs(rows: Tensor, head: int) -> Tensor:
    """Rows (0, w/2), (1, w/2 + 1), … of every head as neighbours: [heads · head, …] → the same."""
    pairs: Tensor = rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
    return pairs


def in_halves(rows: Tensor, head: int) -> Tensor:
    """What `in_pairs` did, undone."""
    halves: Tensor = rows.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halves


def chunks(entry: Entry, *, rows: int = 1) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of boxes that make up a tensor, each of whole rows and about CHUNK_BYTES at most.

    Args:
        entry: the tensor.
        rows: that are not to be parted.
    """
    width = entry.nbytes // max(entry.shape[0], 1)
    step = max(CHUNK_BYTES // max(width * rows, 1), 1) * rows
    for start in range(0, entry.shape[0], step):
        size = min(step, entry.shape[0] - start)
        yield [start] + [0] * (len(entry.shape) - 1), [size, *entry.shape[1:]]


def read_entries(files: Sequence[Path], key: str) -> tuple[dict[str, Entry], dict[str, Path]]:
    """Tensors in safetensors files by name, and the file of each; torch is not imported.

    Raises:
        ConfigError: a file is missing or torn.
    """
    entries: dict[str, Entry] = {}
    places: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    tensor = file.get_slice(name)
                    entries[name] = Entry(dtype=str(tensor.get_dtype()), shape=tuple(tensor.get_shape()))
                    places[name] = path
        except (SafetensorError, OSError) as error:
            reason = "is missing" if not path.exists() else f"cannot be read ({' '.join(str(error).split())[:80]})"
            raise ConfigError(key, path, reason, "fetch the file again") from error
    return entries, places


def check_entries(place: Path, key: str, expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]) -> None:
    """Check that a folder has exactly these tensors, in a format that weights are trained in.

    Raises:
        ConfigError: one is missing, has another shape, is too much, or is quantised.
    """
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            rule = f"{name} is kept as {entry.dtype}, which is no format of plain weights"
            raise ConfigError(key, place, rule, f"give weights in {', '.join(DTYPES.values())}")
    for name in [*expected, *entries]:
        wanted, there = expected.get(name), entries[name].shape if name in entries else None
        if wanted != there:
            rule = f"its config and its tensors disagree: {name} is {_shape(there)}, not {_shape(wanted)}"
            raise ConfigError(key, place, rule, "fetch the folder again, whole")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(map(str, shape)) or "a single number"

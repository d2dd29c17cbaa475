"""Weights in files, torch-free: sources that read one box of a tensor at a time, and titanlab's own weights folder.

    weights.json                     the model, its context, the biases of routers, a digest of the content
    weights-00001-of-00003.safetensors …, weights.index.json
    conf/model/NAME.yaml             the model as an option: --config-dir FOLDER/conf model=NAME
    tokenizer/                       if the source has one
    generation_config.json           if the source has one

A folder appears complete or not at all: it is filled as `….part` and then renamed. Biases of routers are not
parameters: a checkpoint stores them beside its tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from titanlab.costs import block_name
from titanlab.errors import ConfigError
from titanlab.options import schema_of
from titanlab.system import LFS_POINTER, StoreFault, parse_json
from titanlab.techniques.model.contract import Foreign, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


# Number formats of weights that are not quantised, by their names in safetensors.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_WHOLE = "fetch the folder again, whole"
CHUNK_BYTES = 1 << 26
"""Bytes of a tensor that are read, changed and written at a time."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor on disk: its number format, named as in safetensors, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """A model's weights, read a box of a tensor at a time.

    Attributes:
        entries: every parameter by titanlab's name, in the model's order.
        biases: of the routers; empty: there are none.
        about: other values of the folder's config: `max_position_embeddings`, ids of special tokens.
        digest: hash of the content; empty if it is not known.
        copies: tensors that must equal another tensor and are not read: name → the other tensor's name, as in the
            files.
        not_read: a line for each kind of weights in the folder that is not read.
    """

    model: ModelConfig
    entries: Mapping[str, TensorEntry]
    biases: Biases = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    not_read: Sequence[str] = ()

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of one parameter, with rows in titanlab's order, on the CPU, in the dtype of the source."""


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource(WeightsSource):
    """Weights in safetensors files of titanlab or of another library.

    Attributes:
        places: the file of each tensor and its name there, by the tensor's name in `foreign` and `copies`.
        foreign: name and order of rows in the files, by titanlab's name.
    """

    places: Mapping[str, tuple[Path, str]]
    foreign: Mapping[str, Foreign]

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        stored = self.foreign[name]
        first, last = offsets[0], offsets[0] + sizes[0]
        if stored.stack:
            import torch

            parts = [self.read_stored(each, offsets[1:], sizes[1:]) for each in stored.stack[first:last]]
            return torch.stack(parts) if parts else torch.empty(*sizes)
        if not stored.head or not math.prod(sizes):
            return self.read_stored(stored.name, offsets, sizes)
        begin, end = first // stored.head * stored.head, -(-last // stored.head) * stored.head
        heads = self.read_stored(stored.name, [begin, *offsets[1:]], [end - begin, *sizes[1:]])
        return in_pairs(heads, stored.head)[first - begin : last - begin]

    def read_stored(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of one tensor of the files."""
        path, stored = self.places[name]
        # The file is closed after each read, because its mapped pages count as this process's memory.
        with safe_open(path, framework="pt") as file:
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            return cast("Tensor", file.get_slice(stored)[box])


def usual_dtype(source: WeightsSource) -> str:
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


def chunks(entry: TensorEntry, *, rows: int = 1) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of boxes of a tensor: full rows in groups of `rows`, about CHUNK_BYTES in each box."""
    width = entry.nbytes // max(entry.shape[0], 1)
    step = max(CHUNK_BYTES // max(width * rows, 1), 1) * rows
    for start in range(0, entry.shape[0], step):
        size = min(step, entry.shape[0] - start)
        yield [start] + [0] * (len(entry.shape) - 1), [size, *entry.shape[1:]]


def read_entries(
    files: Mapping[Path, Collection[str] | None], key: str
) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Tensors in safetensors files by name, and the file of each; does not import torch.

    Args:
        files: the names of the tensors to read of each file; None: all.

    Raises:
        ConfigError: a file is missing, damaged or not a regular file, or lacks a tensor.
    """
    entries: dict[str, TensorEntry] = {}
    places: dict[str, Path] = {}
    for path, wanted in files.items():
        if path.exists() and not path.is_file():
            # Opening a named pipe would wait for a writer.
            raise ConfigError(key, path, "is no regular file", "fetch the file again")
        try:
            with safe_open(path, framework="np") as file:
                there = set(file.keys())
                for name in sorted(there) if wanted is None else wanted:
                    if name not in there:
                        raise ConfigError(key, path, f"lacks {name}, which the index places in it", _WHOLE)
                    tensor = file.get_slice(name)
                    entries[name] = TensorEntry(dtype=str(tensor.get_dtype()), shape=tuple(tensor.get_shape()))
                    places[name] = path
        except (SafetensorError, OSError) as error:
            if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
                rule = "is a pointer of Git LFS, and not the file"
                raise ConfigError(key, path, rule, "run `git lfs pull` in its repository") from error
            reason = "is missing" if not path.exists() else f"cannot be read ({' '.join(str(error).split())[:80]})"
            raise ConfigError(key, path, reason, "fetch the file again") from error
    return entries, places


def check_entries(
    place: Path, key: str, expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, TensorEntry]
) -> None:
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
        model: the config with which the state was saved; only with the balance `bias` does the state have biases.
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
    """One line for people: their copy of the weights does not contain the biases; empty: there are no biases."""
    if not widest(biases):
        return ""
    return (
        f"left out: the biases of {len(biases)} routers, for which the format has no place. Without them a token whose "
        f"experts' probabilities differ by less than {widest(biases):.2g} (the widest of a block) may get other experts"
    )


MANIFEST = "weights.json"
INDEX = "weights.index.json"
STEM = "weights"
TOKENIZER = "tokenizer"
GENERATION = "generation_config.json"
CONTEXT = "max_position_embeddings"
"""The largest number of tokens in a sequence, by its name in config.json."""
SCHEMA = 1


def is_weights_folder(path: Path) -> bool:
    """Whether a path is a weights folder: it has a manifest."""
    return (path / MANIFEST).is_file()


def open_weights(path: Path, key: str) -> SafetensorsSource:
    """Open the weights in a folder; reads only names, shapes and sizes.

    Raises:
        ConfigError: the folder is not complete.
    """
    manifest = read_object(path / MANIFEST, key)
    try:
        model = model_of(manifest["model"])
        about, digest = checked_about(dict(manifest.get("about", {}))), str(manifest["digest"])
        numbers = {name: list(map(float, block)) for name, block in dict(manifest.get("biases", {})).items()}
        if not all(math.isfinite(number) for block in numbers.values() for number in block):
            raise ValueError("a bias is not finite")
        biases = biases_of(model, numbers, key, path)
        if manifest["schema"] != SCHEMA:
            raise ValueError("another version of titanlab's")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        rule = f"its {MANIFEST} cannot be used ({type(error).__name__}: {error})"
        raise ConfigError(key, path, rule, "import the weights again") from error
    entries, places = read_entries(indexed_files(path, INDEX, f"{STEM}.safetensors", key), key)
    expected = model.account().parameters
    check_entries(path, key, expected, entries)
    return SafetensorsSource(
        model=model,
        entries={name: entries[name] for name in expected},
        places={name: (places[name], name) for name in expected},
        foreign={name: Foreign(name=name) for name in expected},
        about=about,
        digest=digest,
        biases=biases,
    )


def checked_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Check values beside a model's config: `max_position_embeddings` is a whole number of at least 1, or absent.

    Raises:
        ValueError: it has another value; null counts as absent.
    """
    context = about.get(CONTEXT)
    if context is None:
        return {name: value for name, value in about.items() if name != CONTEXT}
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise ValueError(f"{CONTEXT} is no whole number of at least 1")
    return dict(about)


def model_of(mapping: Mapping[str, Any]) -> ModelConfig:
    """Make a model's config from plain values.

    Raises:
        KeyError, TypeError: the values are not those of a model.
        ConfigError: no installed package has this kind of model, or a value breaks a rule.
    """
    schema = schema_of("model", mapping["kind"])
    for entry in dataclasses.fields(schema):
        # A config checks ranges, not types: those are checked where people write values.
        if entry.type in (int, "int") and type(value := mapping.get(entry.name, 0)) is not int:
            raise TypeError(f"{entry.name} is no whole number: {value!r}")
    try:
        model: ModelConfig = schema(**mapping)
    except (ValueError, OverflowError) as error:
        raise TypeError(str(error)) from error
    return model


def indexed_files(path: Path, index: str, single: str, key: str) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the names of the tensors that the index places in it.

    As in transformers, the single file counts if there is also an index with its files, from an earlier save.

    Returns:
        the single file with None for all its tensors, or the files that the index names.

    Raises:
        ConfigError: the index cannot be used, or names a missing file.
    """
    if (path / single).is_file() or not (path / index).is_file():
        return {path / single: None}
    weight_map = read_object(path / index, key).get("weight_map")
    places = dict(weight_map) if isinstance(weight_map, dict) else {}
    if not places or not all(isinstance(name, str) and name == Path(name).name for name in places.values()):
        raise ConfigError(key, path / index, "names no files of this folder", "fetch the file again")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        rule = f"names {len(names)} files, and {len(missing)} are missing: {missing[0]}"
        raise ConfigError(key, path / index, rule, "fetch the folder again, whole")
    return {path / name: [tensor for tensor, file in places.items() if file == name] for name in names}


def read_object(path: Path, key: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ConfigError: the file is missing or has no JSON object.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(key, path.parent, f"has no {path.name}", "name a folder that has one") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ConfigError(key, path, f"cannot be read ({reason})", "fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(key, path, "holds no JSON object", "fetch the file again")
    return value


PART = ".part"


def check_target(folder: Path, is_ours: Callable[[Path], bool], *, force: bool) -> None:
    """Check that a folder can be written; one with files is replaced only with `force`, and only if it has weights.

    Raises:
        ConfigError: the folder must not be replaced, or cannot be written.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not force:
        raise ConfigError("--into", folder, "exists", "name another folder, or give --force to replace it")
    if folder.exists() and not is_ours(folder):
        raise ConfigError("--into", folder, "holds something else than weights", "name another folder")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        rule = "cannot be written (no permission)" if parent.is_dir() else f"cannot be written ({parent} is no folder)"
        raise ConfigError("--into", folder, rule, "name a folder of yours")


def check_apart(source: Path, folder: Path) -> None:
    """Check that the folder to write does not overlap the folder that is read.

    Raises:
        ConfigError: they are the same folder, or one is in the other.
    """
    target, origin = folder.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise ConfigError("--into", folder, "is the folder that is read, or lies in it", "name another folder")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `folder` when the block ends without an error.

    Raises:
        ConfigError: another process is writing the folder, or it cannot be written.
    """
    folder = folder.absolute()
    part = folder.with_name(folder.name + PART)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(exist_ok=True)
        lock = os.open(part, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    is_locked = False
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("--into", folder, "is being written by another process", "wait for it") from None
        except OSError:
            pass  # This file system has no locks, so no other process can hold one.
        is_locked = True
        # A process that died may have left files.
        for path in part.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield part
        _put_in_place(part, folder)
    except StoreFault:
        # The store of the checkpoint that is read has failed, not the folder.
        raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        os.close(lock)
        if is_locked:
            shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, folder: Path) -> None:
    for path in part.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                # Before the rename: after a power cut a folder with the final name must be complete.
                os.fsync(file.fileno())
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError("--into", folder, f"cannot be written ({reason})", "name a folder of yours with room for it")

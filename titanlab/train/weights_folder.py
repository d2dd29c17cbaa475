"""A weights folder: a model's parameters under titanlab's names, with the files that a recipe needs. Torch-free.

    weights.json                     the model, its context, the biases of routers, a digest of the content
    weights-00001-of-00003.safetensors …, weights.index.json
    conf/model/NAME.yaml             the model as an option: --config-dir FOLDER/conf model=NAME
    tokenizer/                       if the source has one
    generation_config.json           if the source has one

A folder appears complete or not at all: it is filled as `….part` and then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.options import schema_of
from titanlab.system.files import StoreFault
from titanlab.system.foreign import Foreign
from titanlab.train.weights_source import SafetensorsSource, biases_of, check_entries, read_entries

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
        biases = biases_of(model, _lists(manifest.get("biases", {})), key, path)
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
        files=places,
        foreign={name: Foreign(name=name) for name in expected},
        about=about,
        digest=digest,
        biases=biases,
    )


def checked_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Values beside a model's config, whose `max_position_embeddings` is a whole number of at least 1, or absent.

    Raises:
        ValueError: it is another value; null counts as absent.
    """
    context = about.get(CONTEXT)
    if context is None:
        return {name: value for name, value in about.items() if name != CONTEXT}
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise ValueError(f"{CONTEXT} is no whole number of at least 1")
    return dict(about)


def _lists(value: Any) -> dict[str, list[float]]:
    """Lists of finite numbers by name.

    Raises:
        TypeError, ValueError: the value is none.
    """
    lists = {name: [float(number) for number in numbers] for name, numbers in dict(value).items()}
    if not all(math.isfinite(number) for numbers in lists.values() for number in numbers):
        raise ValueError("a bias is not finite")
    return lists


def model_of(mapping: Mapping[str, Any]) -> ModelConfig:
    """Make a model's config from plain values.

    Raises:
        KeyError, TypeError: the values are not those of a model.
        ConfigError: no installed package has this kind of model, or a value breaks a rule.
    """
    schema = schema_of("model", mapping["kind"])
    for field in dataclasses.fields(schema):
        # A config checks ranges, not types: those are checked where people write values.
        if field.type in (int, "int") and type(value := mapping.get(field.name, 0)) is not int:
            raise TypeError(f"{field.name} is no whole number: {value!r}")
    try:
        model: ModelConfig = schema(**mapping)
    except (ValueError, OverflowError) as error:
        raise TypeError(str(error)) from error
    return model


def indexed_files(path: Path, index: str, single: str, key: str) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the names of the tensors that the index places in it.

    As in transformers, the single file counts where an index and its files are left of an earlier save.

    Returns:
        the single file with None, which stands for all of its tensors, or the files that the index names.

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
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(key, path.parent, f"has no {path.name}", "name a folder that has one") from error
    except (OSError, ValueError, RecursionError) as error:
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
            pass  # This file system has no locks, so no other process can have one.
        is_locked = True
        # A process that died may have left files.
        for path in part.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield part
        _put_in_place(part, folder)
    except StoreFault:
        # Of the checkpoint that is read; the folder is not at fault.
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

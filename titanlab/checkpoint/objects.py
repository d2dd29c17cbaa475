"""Objects of a remote store: list, read, put, remove and move them. fsspec is imported when the first one is used.

A store has no rename, no append, and no folders: a folder is the common beginning of names. An object is there as a
whole, with one size, or it is not there.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from titanlab.checkpoint.address_schema import StorePath
from titanlab.system import StoreFault

T = TypeVar("T")
# Waits between the attempts at a request. Packages of stores have such attempts of their own, not all of them.
_WAITS = (0.3, 1.5)
# Another attempt would find the same.
_CERTAIN = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object."""

    size: int
    modified: float


def filesystem(path: StorePath) -> tuple[Any, str]:
    """Fsspec's file system of a store, and the path in it."""
    fsspec: Any = importlib.import_module("fsspec.core")
    store_and_path: tuple[Any, str] = fsspec.url_to_fs(path.address)
    return store_and_path


def tried(path: StorePath, action: Callable[[Any, str], T]) -> T:
    """What requests to a store return; they are made again after errors that may pass, such as an overloaded store.

    Args:
        action: takes fsspec's file system of the store, and the path in it.

    Raises:
        FileNotFoundError: there is no such object.
        StoreFault: the store does not answer, or refuses.
    """

    def request() -> T:
        with store_errors(path):
            return action(*filesystem(path))

    return again(request)


def again(action: Callable[[], T]) -> T:
    """What an action returns; it is done again after each StoreFault that may pass."""
    for wait in _WAITS:
        try:
            return action()
        except StoreFault as fault:
            if isinstance(fault.__cause__, _CERTAIN):
                raise
        time.sleep(wait)
    return action()


@contextlib.contextmanager
def store_errors(path: StorePath) -> Iterator[None]:
    """Raise every error of a store as StoreFault, except FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, StoreFault):
        raise
    # Packages of stores have errors of their own, of botocore, aiohttp and google-auth for example.
    except Exception as error:
        raise StoreFault(path.address, _line(error)) from error


@contextlib.contextmanager
def gone_is_fault(path: StorePath) -> Iterator[None]:
    """Raise FileNotFoundError as StoreFault, where it means that the bucket or the folder is gone."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreFault(path.address, f"it is gone ({_line(error)})") from error


def objects_below(folder: StorePath) -> dict[str, StoredObject]:
    """The objects below a folder, by their names from there; empty if there is none."""

    def listed(store: Any, root: str) -> dict[str, StoredObject]:
        # Other processes write there too.
        store.invalidate_cache()
        try:
            entries: dict[str, dict[str, Any]] = store.find(root, detail=True)
        except FileNotFoundError:
            return {}
        below = f"{root.rstrip('/')}/"
        return {
            name.removeprefix(below): StoredObject(size=int(about.get("size") or 0), modified=_modified(about))
            for name, about in entries.items()
            if name.startswith(below)
        }

    return tried(folder, listed)


def size_of(path: StorePath) -> int:
    """Bytes of an object; raises as `tried`."""

    def asked(store: Any, name: str) -> int:
        store.invalidate_cache()
        about = store.info(name)
        if about.get("type") == "directory":
            raise FileNotFoundError(name)
        return int(about["size"])

    return tried(path, asked)


def exists(path: StorePath) -> bool:
    """Whether there is an object of this name."""
    try:
        size_of(path)
    except FileNotFoundError:
        return False
    return True


def read_all(path: StorePath, most_bytes: int) -> bytes:
    """The first bytes of an object; raises as `tried`."""
    wanted = min(size_of(path), most_bytes)

    def read(store: Any, name: str) -> bytes:
        content: bytes = store.cat_file(name, start=0, end=wanted) if wanted else b""
        check_length(len(content), wanted)
        return content

    return tried(path, read)


def check_length(got: int, wanted: int) -> None:
    """Check that a store has sent all bytes of a range that an object has."""
    if got != wanted:
        raise OSError(f"it has sent {got} bytes of {wanted}")


def put(path: StorePath, content: bytes) -> None:
    """Write a small object, and read it back.

    Raises:
        StoreFault: the store does not answer, refuses, or has kept other bytes.
    """

    def written(store: Any, name: str) -> None:
        store.pipe_file(name, content)
        store.invalidate_cache()
        if store.cat_file(name) != content:
            raise OSError("it has kept other bytes than were written")

    with gone_is_fault(path):
        tried(path, written)


def remove_objects(folder: StorePath, *, first: str) -> None:
    """Remove all objects of a folder.

    Args:
        first: the name of the object that is removed before the others: without it the others count no more.
    """
    for name in sorted(objects_below(folder), key=lambda name: (name != first, name)):
        with contextlib.suppress(FileNotFoundError):
            tried(folder / name, lambda store, path: store.rm_file(path))


def move_objects(folder: StorePath, to: StorePath, *, last: str) -> None:
    """Give the objects of a folder another name: they are copied in the store, and then removed.

    Args:
        last: the name of the object that is copied as the last and removed as the first. Whenever the process dies, at
            least one of the two folders is whole.
    """
    _, target = filesystem(to)

    def copy(name: str) -> None:
        with gone_is_fault(folder / name):
            tried(folder / name, lambda store, path: store.cp_file(path, f"{target}/{name}"))

    for name in sorted(objects_below(folder), key=lambda name: (name == last, name)):
        copy(name)
    remove_objects(folder, first=last)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _modified(about: dict[str, Any]) -> float:
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = about.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0

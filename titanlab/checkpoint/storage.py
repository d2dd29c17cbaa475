"""The folders and files of checkpoints, on a disk or in a store of fsspec. Free of torch.

A disk makes a checkpoint complete by a rename, and durable by fsync; fsspec's local layer has no fsync, follows links,
and makes another copy, so files of a disk are opened directly. A store has no rename, no append, and no folders: a
folder is the common beginning of names. An object exists completely or not at all, so a checkpoint in a store is
complete when it has its index, which is written last and removed first.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.errors import ConfigError
from titanlab.system import StoreFault, read_at_most, write_bytes

T = TypeVar("T")
# The file that lists what a checkpoint contains.
INDEX = "index.json"
PART = ".part"

# Seconds between attempts at a request. Some packages of stores retry by themselves, but not all.
_WAITS = (0.3, 1.5)
# Errors that a retry would not change.
_CERTAIN = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_MOST_TEXT = 200


class DamagedFile(ValueError):
    """A file of a checkpoint is not what was saved; the message names the file and says why, without a subject."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint cannot be used, because its files are not those that a run has saved.

    A run that resumes by itself falls back to the checkpoint before.
    """


def one_line(text: object) -> str:
    """Text from a file that may be from a stranger, in one line of bounded length."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}…"


class DiskFolder:
    """A checkpoint's folder on this host, or the folder of a run's checkpoints; it need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def steps(self) -> dict[str, bool]:
        """Names `step-…` of the folders in it, and whether each counts: an unfinished save in a store does not.

        On a disk a checkpoint with missing files counts, so that it is found damaged instead of being skipped silently.
        """
        return {
            path.name: path.is_dir() if path.suffix else DiskFolder(path).is_checkpoint()
            for path in self._path.glob("step-*")
        }

    def unfinished(self) -> list[str]:
        """Names of folders left in it by processes that died while they saved, removed or copied."""
        return [path.name for path in self._path.glob(f"step-*{PART}")]

    def begin(self, name: str) -> Place:
        """The folder into which all ranks write the checkpoint `name`; made if necessary."""
        part = self._path / f"{name}{PART}"
        # Do not create the run's folder: if it was moved or removed, a new one would lack its records.
        with contextlib.suppress(FileExistsError):
            self._path.mkdir()
        if not self._path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self._path))
        part.mkdir()
        return part

    def is_checkpoint(self) -> bool:
        """Whether the folder has files of a checkpoint; in a store, whether it has the index."""
        return os.path.lexists(self._path / INDEX) or any(self._path.glob("rank-*.safetensors"))

    def is_taken(self) -> bool:
        """Whether the name is taken, so that no checkpoint can get it."""
        return os.path.lexists(self._path)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of the files of these names; files that are missing are left out."""
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = (self._path / name).stat().st_size
        return found

    def describe(self) -> tuple[int, float]:
        """Bytes of all files, and when the checkpoint was complete, in seconds since the epoch."""
        return sum(file.lstat().st_size for file in self._path.iterdir()), self._path.stat().st_mtime

    def read(self, name: str, most_bytes: int) -> bytes:
        """The content of a file.

        Raises:
            DamagedFile: it is missing, is not a regular file, or has more bytes.
            OSError: it cannot be read, but may be undamaged.
        """
        with open(open_regular(self._path / name), "rb") as file:
            return _bounded(name, read_at_most(file, most_bytes + 1), most_bytes)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file as a whole, and wait until its content is durable."""
        write_bytes(self._path / name, content, durable=True)

    def tried(self, action: Callable[[], T]) -> T:
        """The result of an action that writes here; in a store, retries after errors that may be temporary."""
        return action()

    def check_arrived(self, sizes: Mapping[str, int]) -> None:
        """Check that a store has all bytes that other hosts have written; on a disk fsync has ensured this."""

    def commit(self, final: Place) -> None:
        """Give a checkpoint its name, durably; all its files must be durable."""
        sync_folder(self._path)
        self.rename(final)
        sync_folder(self._path.parent)

    def rename(self, to: Place) -> None:
        """Give a checkpoint another name. If the process dies meanwhile, one of the names is a whole checkpoint."""
        self._path.rename(str(to))

    def remove(self) -> None:
        """Remove a checkpoint if it exists; for a symbolic link only the link, never its target.

        If the process dies meanwhile, the remains do not count as a checkpoint.
        """
        path = self._path
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name.endswith(PART):
            shutil.rmtree(path)
        else:
            # Rename first: a reader must never find a part of the checkpoint.
            gone = path.with_name(f"{path.name}.gone{PART}")
            if gone.exists():
                shutil.rmtree(gone)
            shutil.rmtree(path.rename(gone))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreFolder:
    """A folder of a remote store, as `DiskFolder`; StoreFault: the store does not answer, or refuses."""

    def __init__(self, path: StorePath) -> None:
        self._path = path

    def objects(self) -> dict[str, dict[str, Any]]:
        """The information of fsspec on each object, by name relative to this folder; empty if there are no objects."""

        def listed(store: Any, root: str) -> dict[str, dict[str, Any]]:
            # Other processes write there too: do not use fsspec's cache.
            store.invalidate_cache()
            try:
                entries: dict[str, dict[str, Any]] = store.find(root, detail=True)
            except FileNotFoundError:
                return {}
            below = f"{root.rstrip('/')}/"
            return {name.removeprefix(below): about for name, about in entries.items() if name.startswith(below)}

        return tried(self._path, listed)

    def steps(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for name in self.objects():
            step, slash, file = name.partition("/")
            if slash and step.startswith("step-"):
                found[step] = found.get(step, False) or file == INDEX
        return found

    def unfinished(self) -> list[str]:
        return [name for name, has_index in self.steps().items() if not has_index]

    def begin(self, name: str) -> StorePath:
        # Write under the final name: a rename would copy all bytes, and a folder without an index does not count.
        final = self._path / name
        return self._path / f"{name}{PART}" if StoreFolder(final).is_checkpoint() else final

    def is_checkpoint(self) -> bool:
        try:
            size_of(self._path / INDEX)
        except FileNotFoundError:
            return False
        return True

    def is_taken(self) -> bool:
        return self.is_checkpoint()

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        # One list, because every rank checks every file.
        objects = self.objects()
        return {name: int(objects[name].get("size") or 0) for name in names if name in objects}

    def describe(self) -> tuple[int, float]:
        objects = self.objects().values()
        return sum(int(about.get("size") or 0) for about in objects), max(map(_modified, objects), default=0.0)

    def read(self, name: str, most_bytes: int) -> bytes:
        path = self._path / name

        def read(store: Any, name: str) -> bytes:
            content: bytes = store.cat_file(name, start=0, end=wanted) if wanted else b""
            check_length(len(content), wanted)
            return content

        try:
            wanted = min(size_of(path), most_bytes + 1)
            return _bounded(name, tried(path, read), most_bytes)
        except FileNotFoundError:
            raise DamagedFile(f"its file {name} is missing") from None

    def put(self, name: str, content: bytes) -> None:
        """Also read it back; StoreFault: the store has kept other bytes."""

        def written(store: Any, name: str) -> None:
            store.pipe_file(name, content)
            store.invalidate_cache()
            if store.cat_file(name) != content:
                raise OSError("it has kept other bytes than were written")

        with _gone_is_fault(self._path / name):
            tried(self._path / name, written)

    def remove(self) -> None:
        for name in sorted(self.objects(), key=lambda name: (name != INDEX, name)):
            with contextlib.suppress(FileNotFoundError):
                tried(self._path / name, lambda store, path: store.rm_file(path))

    def rename(self, to: Place) -> None:
        """Copy the objects in the store, the index last; then remove the originals, the index first."""
        assert isinstance(to, StorePath)
        _, target = filesystem(to)
        for name in sorted(self.objects(), key=lambda name: (name == INDEX, name)):
            copy = f"{target}/{name}"
            with _gone_is_fault(self._path / name):
                tried(self._path / name, lambda store, path, copy=copy: store.cp_file(path, copy))  # type: ignore[misc]
        self.remove()

    commit = rename

    def check_arrived(self, sizes: Mapping[str, int]) -> None:
        stored = self.sizes(sizes)
        for name, size in sizes.items():
            if stored.get(name, 0) != size:
                rule = f"it has {stored.get(name, 0)} bytes of {name}, and {size} were written"
                raise StoreFault(self._path.address, rule)

    def tried(self, action: Callable[[], T]) -> T:
        with _gone_is_fault(self._path):
            return _again(action)


Folder = DiskFolder | StoreFolder


def folder_at(place: Place) -> Folder:
    return StoreFolder(place) if isinstance(place, StorePath) else DiskFolder(place)


def filesystem(path: StorePath) -> tuple[Any, str]:
    """Fsspec's file system of a store, and the path in it."""
    fsspec: Any = importlib.import_module("fsspec.core")
    store_and_path: tuple[Any, str] = fsspec.url_to_fs(path.address)
    return store_and_path


def tried(path: StorePath, action: Callable[[Any, str], T]) -> T:
    """The result of requests to a store; retries after errors that may be temporary, such as an overloaded store.

    Args:
        action: takes fsspec's file system of the store, and the path in it.

    Raises:
        FileNotFoundError: there is no such object.
        StoreFault: the store does not answer, or refuses.
    """

    def request() -> T:
        with store_errors(path):
            return action(*filesystem(path))

    return _again(request)


def _again(action: Callable[[], T]) -> T:
    """The result of an action; retries after a StoreFault that may be temporary."""
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
    # Packages of stores raise their own errors, such as those of botocore, aiohttp and google-auth.
    except Exception as error:
        raise StoreFault(path.address, _line(error)) from error


@contextlib.contextmanager
def _gone_is_fault(path: StorePath) -> Iterator[None]:
    """Raise FileNotFoundError as StoreFault, if it means that the bucket or the folder is missing."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreFault(path.address, f"it is gone ({_line(error)})") from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def size_of(path: StorePath) -> int:
    """Bytes of an object; raises as `tried`."""

    def asked(store: Any, name: str) -> int:
        store.invalidate_cache()
        about = store.info(name)
        if about.get("type") == "directory":
            raise FileNotFoundError(name)
        return int(about["size"])

    return tried(path, asked)


def _modified(about: Mapping[str, Any]) -> float:
    """When an object was written. Packages of stores have different names for this time."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = about.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def check_length(got: int, wanted: int) -> None:
    """Check that a store has sent all bytes of a range that an object has."""
    if got != wanted:
        raise OSError(f"it has sent {got} bytes of {wanted}")


def _bounded(name: str, content: bytes, most_bytes: int) -> bytes:
    if len(content) > most_bytes:
        raise DamagedFile(f"its file {name} has more than {most_bytes} bytes")
    return content


def open_regular(path: Path) -> int:
    """Open a file of a checkpoint for reading. Returns its descriptor.

    Symbolic links are not followed: a checkpoint from a stranger must not read files outside of its folder.

    Raises:
        DamagedFile: the file is missing, or is not a regular file.
        OSError: the file cannot be opened, but may be undamaged.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            # An NFS client may have cached that a new file does not exist; listing the folder refreshes the cache.
            os.listdir(path.parent)
            descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFile(f"its file {path.name} is missing") from None
    except OSError as error:
        if path.is_symlink():
            raise DamagedFile(f"its file {path.name} is a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile(f"its {path.name} is no file")
    return descriptor

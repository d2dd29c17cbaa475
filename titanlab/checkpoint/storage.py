"""Reads and writes the folders and files of checkpoints, on a disk or in a remote store of fsspec. Free of torch.

On a disk a rename makes a checkpoint complete, and fsync makes it durable. fsspec's local layer has no fsync, follows
links, and copies the bytes once more, so files of a disk are opened without fsspec. A store has no rename, append or
folders: a folder is the common beginning of names. An object exists completely or not at all. So a checkpoint in a
store is complete when it has its index, which is written last and removed first.

Files of tensors are written in sequence, with a checksum for each block of 1 MiB; a reader verifies each block.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.errors import ConfigError
from titanlab.system import StoreFault, read_at_most, write_bytes

T = TypeVar("T")
# The file that lists what a checkpoint contains.
INDEX = "index.json"
PART = ".part"
BLOCK = 1 << 20
"""Bytes of a block; the last block of a file may be shorter."""

# Size of the writer's buffer: small enough to stay in the processor's cache while it is filled, hashed and written.
_BUFFER = 4 * BLOCK
# The most bytes that one call reads from a file.
_MOST_READ = 8 * BLOCK
# Bytes of one request to a store: enough that the latency counts little. Several requests run at the same time.
_PIECE = 8 << 20
_MOST_REQUESTED = 8 * _PIECE
_PART_BYTES = 64 << 20
# The most parts in which an object is uploaded to a store: S3 takes 10,000.
_MOST_PARTS = 9_000
# Seconds between attempts at a request; only some of the packages for stores retry by themselves.
_WAITS = (0.3, 1.5)
# Errors that a retry would not change.
_CERTAIN = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
_MOST_TEXT = 200

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
}
"""Bytes of an element, by the dtype's name in torch."""


class DamagedFile(ValueError):
    """A file of a checkpoint is not as it was saved; the message names the file and the fault ("its file x is …")."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint cannot be used, because its files are not those that a run has saved.

    A run that resumes by itself falls back to the checkpoint before.
    """


def one_line(text: object) -> str:
    """Make one line of bounded length from the text of a file, which may come from a stranger."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}…"


def parsed(content: bytes, kind: type[T], name: str) -> T:
    """The content of a JSON file of a checkpoint.

    Raises:
        DamagedFile: the content is not JSON, or a value has the wrong type.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        where = re.sub(r"^`(key` in `)?\$\.?|`$", "", place)
        text = f"has {where}: {rule}" if where else f"does not fit ({rule})"
        raise DamagedFile(f"its {name} {one_line(text)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"its file {name} is not JSON ({one_line(error)})") from error


class DiskFolder:
    """A folder on this host: that of one checkpoint, or that of a run's checkpoints; it need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def steps(self) -> dict[str, bool]:
        """Names `step-…` of the inner folders → whether each is a checkpoint; in a store an unfinished save is none.

        On a disk a folder that lacks files is one, so that it is found damaged instead of being skipped silently.
        """
        return {
            path.name: path.is_dir() if path.suffix else DiskFolder(path).is_checkpoint()
            for path in self._path.glob("step-*")
        }

    def unfinished(self) -> list[str]:
        """Names of the inner folders that processes left when they died while they saved, removed or copied."""
        return [path.name for path in self._path.glob(f"step-*{PART}")]

    def begin(self, name: str) -> Place:
        """The folder into which all ranks write the checkpoint `name`; on a disk this makes the folder."""
        part = self._path / f"{name}{PART}"
        # Do not create the run's folder (no `parents=True`): if it was moved, a new one would lack the run's records.
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
        """Whether something has this name already, so that no checkpoint can be renamed to it."""
        return os.path.lexists(self._path)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Size in bytes of each file with one of these names; missing files are left out."""
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = (self._path / name).stat().st_size
        return found

    def describe(self) -> tuple[int, float]:
        """Size of all files in bytes, and when the checkpoint was complete, in seconds since the epoch."""
        return sum(file.lstat().st_size for file in self._path.iterdir()), self._path.stat().st_mtime

    def read(self, name: str, most_bytes: int) -> bytes:
        """The content of a file.

        Raises:
            DamagedFile: the file is missing, is not a regular file, or has more bytes.
            OSError: the file cannot be read, but may be undamaged.
        """
        with open_regular(self._path / name) as file:
            return _bounded(name, read_at_most(file, most_bytes + 1), most_bytes)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file as a whole, and wait until its content is durable."""
        write_bytes(self._path / name, content, durable=True)

    def commit(self, final: Place) -> None:
        """Give a checkpoint its name, durably; all its files must be durable."""
        sync_folder(self._path)
        self.rename(final)
        sync_folder(self._path.parent)

    def rename(self, to: Place) -> None:
        """Give a checkpoint another name. If the process dies meanwhile, one of the two names is a whole checkpoint."""
        self._path.rename(str(to))

    def remove(self) -> None:
        """Remove a checkpoint if it exists; if it is a symbolic link, remove the link, never the target.

        If the process dies meanwhile, the remains do not count as a checkpoint.
        """
        path = self._path
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name.endswith(PART):
            shutil.rmtree(path)
        else:
            # Rename before removing: a reader must never find a part of the checkpoint.
            gone = path.with_name(f"{path.name}.gone{PART}")
            if gone.exists():
                shutil.rmtree(gone)
            shutil.rmtree(path.rename(gone))


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StoreFolder:
    """A folder of a store, with the methods of `DiskFolder`. StoreFault: the store does not answer, or refuses."""

    def __init__(self, path: StorePath) -> None:
        self._path = path

    def objects(self) -> dict[str, dict[str, Any]]:
        """What fsspec knows of each object, by the object's name in this folder; empty if there are no objects."""

        def listed(store: Any, root: str) -> dict[str, dict[str, Any]]:
            # Do not use fsspec's cache, because other processes write to the store too.
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
            _size_of(self._path / INDEX)
        except DamagedFile:
            return False
        return True

    is_taken = is_checkpoint

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        # List the folder once instead of asking for each file: every rank checks every file.
        objects = self.objects()
        return {name: int(objects[name].get("size") or 0) for name in names if name in objects}

    def describe(self) -> tuple[int, float]:
        size, written = 0, 0.0
        for about in self.objects().values():
            size += int(about.get("size") or 0)
            # Each store's package has its own name for the time of writing.
            for key in ("LastModified", "last_modified", "updated", "mtime", "created"):
                time_of = about.get(key)
                seconds = time_of.timestamp() if isinstance(time_of, datetime) else time_of
                if isinstance(seconds, (int, float)):
                    written = max(written, seconds)
                    break
        return size, written

    def read(self, name: str, most_bytes: int) -> bytes:
        path = self._path / name
        content = bytearray(min(_size_of(path), most_bytes + 1))
        _read_range(path, memoryview(content), 0)
        return _bounded(name, bytes(content), most_bytes)

    def put(self, name: str, content: bytes) -> None:
        """Write a small object, and read it back. StoreFault: the store has kept bytes other than these."""

        def written(store: Any, name: str) -> None:
            store.pipe_file(name, content)
            store.invalidate_cache()
            if store.cat_file(name) != content:
                raise OSError("it has kept other bytes than were written")

        tried(self._path / name, written)

    def check_arrived(self, sizes: Mapping[str, int]) -> None:
        """Check that the store has all bytes of files that other hosts have written; on a disk fsync ensures this."""
        stored = self.sizes(sizes)
        for name, size in sizes.items():
            if stored.get(name, 0) != size:
                rule = f"it has {stored.get(name, 0)} bytes of {name}, and {size} were written"
                raise StoreFault(self._path.address, rule)

    def rename(self, to: Place) -> None:
        """Copy the objects in the store, the index last; then remove the originals, the index first."""
        assert isinstance(to, StorePath)
        _, target = filesystem(to)
        for name in sorted(self.objects(), key=lambda name: (name == INDEX, name)):
            copy = f"{target}/{name}"
            tried(self._path / name, lambda store, path, copy=copy: store.cp_file(path, copy))  # type: ignore[misc]
        self.remove()

    commit = rename

    def remove(self) -> None:
        def removed(store: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(path)

        for name in sorted(self.objects(), key=lambda name: (name != INDEX, name)):
            tried(self._path / name, removed)


def folder_at(place: Place) -> DiskFolder | StoreFolder:
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
        StoreFault: the store does not answer, or refuses, or there is no such object.
    """

    def request() -> T:
        with _store_errors(path):
            return action(*filesystem(path))

    return _again(request)


def written_again(place: Place, write: Callable[[], T]) -> T:
    """Write a file into a folder; in a store, write it again after errors that may be temporary."""
    return write() if isinstance(place, Path) else _again(write)


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
def _store_errors(path: Place) -> Iterator[None]:
    """A context in which every error of a store is raised as StoreFault; errors of a disk stay as they are."""
    try:
        yield
    # Packages of stores raise their own errors, such as those of botocore, aiohttp and google-auth.
    except Exception as error:
        if isinstance(path, Path) or isinstance(error, StoreFault):
            raise
        line = f"it is gone ({_line(error)})" if isinstance(error, FileNotFoundError) else _line(error)
        raise StoreFault(path.address, line) from error


def _found(path: StorePath, action: Callable[[Any, str], T]) -> T:
    """As `tried`, but raises DamagedFile if there is no such object."""
    try:
        return tried(path, action)
    except StoreFault as fault:
        if isinstance(fault.__cause__, FileNotFoundError):
            raise DamagedFile(f"its file {path.name} is missing") from None
        raise


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _size_of(path: StorePath) -> int:
    """Size of an object in bytes; raises the errors of `_found`."""

    def asked(store: Any, name: str) -> int:
        store.invalidate_cache()
        about = store.info(name)
        if about.get("type") == "directory":
            raise FileNotFoundError(name)
        return int(about["size"])

    return _found(path, asked)


def _read_range(path: StorePath, target: memoryview, at: int) -> None:
    """Fill `target` with the bytes of an object from `at` on, in parallel requests; raises the errors of `_found`."""
    starts = range(at, at + len(target), _PIECE)
    ends = [min(start + _PIECE, at + len(target)) for start in starts]

    def read(store: Any, name: str) -> None:
        pieces = store.cat_ranges([name] * len(ends), list(starts), ends, on_error="raise")
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            # Before fsspec's pull request 2045 (June 2026), async stores return errors here, whatever `on_error` says.
            if isinstance(piece, Exception):
                raise piece
            if len(piece) != end - start:
                raise OSError(f"it has sent {len(piece)} bytes of {end - start}")
            target[start - at : end - at] = piece

    _found(path, read)


def _bounded(name: str, content: bytes, most_bytes: int) -> bytes:
    if len(content) > most_bytes:
        raise DamagedFile(f"its file {name} has more than {most_bytes} bytes")
    return content


def open_regular(path: Path) -> Any:
    """Open a file of a checkpoint for reading, as bytes.

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
            # Try again: an NFS client may remember that a new file does not exist; listing the folder refreshes that.
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
        raise DamagedFile(f"its {path.name} is not a file")
    return open(descriptor, "rb")


def checksum(content: bytes | bytearray | memoryview) -> int:
    """XXH3 with 64 bits: 7.7 GB/s on one core; zlib.crc32 has 32 bits and 2.4 GB/s."""
    return xxhash.xxh3_64_intdigest(content)


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


class BlockWriter:
    """Writes a new file in sequence.

    In a store an object exists only after `finish`, and then completely; on a disk an unfinished file stays.

    Args:
        size: size of the file, or 0 if unknown; for a large object a store needs the size.

    Attributes:
        size: number of bytes written so far.
        checksums: eight bytes, little-endian, for each complete block; after `finish` also for the last block.
    """

    def __init__(self, path: Place, size: int = 0) -> None:
        self._path = path
        self._file: Any
        with _store_errors(path):
            if isinstance(path, StorePath):
                store, name = filesystem(path)
                self._file = store.open(name, "wb", block_size=max(_PART_BYTES, -(-size // _MOST_PARTS)))
            else:
                # Another host may have made the folder: this host may not see it yet, or may have a disk of its own.
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("xb")
        self._buffer = memoryview(bytearray(_BUFFER))
        self._filled = 0
        self._is_finished = False
        self.size = 0
        self.checksums = bytearray()

    def write(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while len(rest):
            if not self._filled and len(rest) >= _BUFFER:
                # Write without a copy: a copy would hold Python's GIL, which hashing and writing release.
                self._put(rest[:_BUFFER])
                rest = rest[_BUFFER:]
                continue
            taken = min(len(rest), _BUFFER - self._filled)
            self._buffer[self._filled : self._filled + taken] = rest[:taken]
            self._filled += taken
            rest = rest[taken:]
            if self._filled == _BUFFER:
                self._put(self._buffer)
                self._filled = 0

    def finish(self) -> None:
        """Write the buffer, and wait until the whole file is on the disk or in the store."""
        self._put(self._buffer[: self._filled])
        self._filled = 0
        with _store_errors(self._path):
            if isinstance(self._path, StorePath):
                self._file.close()
            else:
                self._file.flush()
                os.fsync(self._file.fileno())
        self._is_finished = True

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(self._path, Path):
            self._file.close()
        elif not (self._is_finished or getattr(self._file, "closed", False)):
            # Ignore errors here, to keep the original error; some stores cannot discard.
            with contextlib.suppress(Exception):
                self._file.discard()
            # Mark the file as closed: otherwise fsspec would complete the upload when the file is garbage-collected.
            with contextlib.suppress(AttributeError):
                self._file.closed = True

    def _put(self, content: memoryview) -> None:
        """Write whole blocks of 1 MiB, or the end of the file, and add their checksums."""
        self.size += len(content)
        for start in range(0, len(content), BLOCK):
            self.checksums += checksum(content[start : start + BLOCK]).to_bytes(8, "little")
        with _store_errors(self._path):
            self._file.write(content)


class BlockReader:
    """Reads ranges of a file, and verifies each block of 1 MiB that has a part of them.

    A block is read only once if the ranges are read in the order of the file and do not overlap.

    Args:
        size, checksums: the attributes that the file's `BlockWriter` had after `finish`.

    Raises:
        DamagedFile: the file is missing, is not a regular file, or has another size.
    """

    def __init__(self, path: Place, size: int, checksums: bytes | bytearray) -> None:
        self._path, self._name, self._size, self._checksums = path, path.name, size, checksums
        # None for an object of a store: nothing is open there.
        self._file: Any = None
        if isinstance(path, StorePath):
            self._most = _MOST_REQUESTED
            actual = _size_of(path)
        else:
            self._most = _MOST_READ
            self._file = open_regular(path)
            actual = os.fstat(self._file.fileno()).st_size
        self._edge_number, self._edge = -1, memoryview(b"")
        if actual != size:
            self.__exit__()
            raise DamagedFile(f"its file {self._name} has {actual} bytes, and had {size} when it was saved")

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the file from `start` on.

        Raises:
            DamagedFile: a block differs from the one that was written.
        """
        at, stop = start, start + len(target)
        while at < stop:
            number, inside = divmod(at, BLOCK)
            if inside == 0 and stop - at >= BLOCK and number != self._edge_number:
                # Read whole blocks directly into the target, without a copy.
                count = min((stop - at) // BLOCK, self._most // BLOCK)
                self._read(number, target[at - start : at - start + count * BLOCK])
                at += count * BLOCK
                continue
            if number != self._edge_number:
                edge = memoryview(bytearray(min(BLOCK, self._size - number * BLOCK)))
                self._read(number, edge)
                self._edge_number, self._edge = number, edge
            taken = min(len(self._edge) - inside, stop - at)
            target[at - start : at - start + taken] = self._edge[inside : inside + taken]
            at += taken

    def verify(self) -> None:
        """Read and verify all blocks; raises the errors of `read_into`."""
        buffer = memoryview(bytearray(min(self._most, self._size)))
        for start in range(0, self._size, self._most):
            self._read(start // BLOCK, buffer[: min(self._most, self._size - start)])

    def _read(self, number: int, target: memoryview) -> None:
        if isinstance(self._path, StorePath):
            _read_range(self._path, target, number * BLOCK)
        else:
            self._file.seek(number * BLOCK)
            if self._file.readinto(target) != len(target):
                raise DamagedFile(f"its file {self._name} is shorter than it was when it was saved")
        for start in range(0, len(target), BLOCK):
            block = number + start // BLOCK
            expected = int.from_bytes(self._checksums[8 * block : 8 * block + 8], "little")
            if checksum(target[start : start + BLOCK]) != expected:
                place = f"in its block {block} of 1 MiB"
                raise DamagedFile(f"its file {self._name} has other bytes than were saved, {place}")

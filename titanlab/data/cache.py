"""The cache folder of prepared data, which several processes can fill together, and the hashes that identify data."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from titanlab.data.contract import Report
from titanlab.errors import ConfigError
from titanlab.records import holder, name_holder
from titanlab.system import home, user_path, write_text

VARIABLE = "TITANLAB_CACHE"
# Seconds between two attempts to get a lock.
_LOOK_SECONDS = 0.2


def location() -> Path:
    """The cache folder, which need not exist: `$TITANLAB_CACHE`, `$XDG_CACHE_HOME/titanlab`, or `~/.cache/titanlab`."""
    if folder := os.environ.get(VARIABLE):
        return user_path(folder)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "titanlab"
    if (own := home()) is None:
        rule = "is not set, and this user has no home folder (no HOME, no passwd entry)"
        raise ConfigError(VARIABLE, None, rule, f"export {VARIABLE}=<a folder you can write to>")
    return own / ".cache" / "titanlab"


def root() -> Path:
    """The cache folder, created if it is missing."""
    folder = location()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError(VARIABLE, folder, rule, f"export {VARIABLE}=<a folder you can write to>") from error
    return folder


def build(
    folder: Path, make: Callable[[Path], None], *, report: Report, is_whole: Callable[[Path], bool] = Path.is_dir
) -> None:
    """Make a folder once, even if several processes call this at the same time.

    The folder appears complete or not at all: `make` fills a temporary folder beside it, which is then renamed.
    While one process makes the folder, the others wait.

    Args:
        is_whole: tells whether an existing folder can be used. If it cannot, for example after a power cut, the folder
            is made again.

    Raises:
        ConfigError: the disk is full or the folder cannot be written.
    """
    if folder.is_dir() and is_whole(folder):
        return
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), report) as alone:
            if folder.is_dir():
                if is_whole(folder):
                    return
                report(f"{folder} is damaged: making it again")
                shutil.rmtree(folder)
            prefix = f".{folder.name}.making-"
            if alone:
                # Remove the temporary folders that killed processes left behind.
                for leftover in folder.parent.glob(prefix + "*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            try:
                with beside(folder, prefix) as temporary:
                    make(temporary)
            except OSError:
                # Ignore the error if the folder exists: without locks another process may have made the same folder.
                if not folder.is_dir():
                    raise


@contextlib.contextmanager
def beside(folder: Path, prefix: str) -> Iterator[Path]:
    """A temporary folder, which is renamed to `folder` if the `with` statement ends without an error."""
    temporary = folder.with_name(prefix + secrets.token_hex(6))
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[bool]:
    """Hold a file lock, which the system releases if this process dies; yields whether the file system has locks."""
    with path.open("a+") as file:
        said = None
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                # Wait without a time limit: nobody knows how long the other process needs for the data.
                name, stopped = holder(file.fileno())
                words = f"waiting for {name}, which {stopped or 'prepares the same data'}"
                if words != said:
                    report(words)
                said = words
                time.sleep(_LOOK_SECONDS)
            name_holder(file.fileno())
            alone = True
        except OSError as error:
            # Go on without a lock if the file system has none: the rename in `beside` is safe, only work is repeated.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            alone = False
        yield alone


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG):
            raise
        rule = f"prepared data cannot be written here ({error.strerror})"
        cure = f"make room, or export {VARIABLE}=<a folder you can write to>"
        raise ConfigError(VARIABLE, folder.parent, rule, cure) from error


WHOLE_BYTES = 256 << 20
"""If all files together are larger than this, only samples of each file are hashed."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 16
# Do not cache the hash of a file changed within these seconds: another change may keep the modification time.
_SETTLED_SECONDS = 2.0


def hash_of_values(*values: object) -> str:
    """A hash of plain values in their order: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def hash_of_files(files: Sequence[Path]) -> str:
    """A hash of the contents of files in their order, without names and times: 32 hexadecimal digits.

    The cache keeps the hash under the files' paths, sizes and times, so that the next call need not read the files.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [(os.path.abspath(path), path.stat()) for path in files]
    versions = tuple((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)
    newest = max((max(stat.st_mtime, stat.st_ctime) for _, stat in stats), default=0.0)
    return _hash(versions) if newest > time.time() - _SETTLED_SECONDS else _cached_hash(versions)


@functools.cache
def _cached_hash(versions: tuple[tuple[str, int, int, int], ...]) -> str:
    entry = root() / "fingerprints" / hash_of_values(1, versions)
    with contextlib.suppress(OSError):
        if len(digits := entry.read_text()) == 32:
            return digits
    digits = _hash(versions)
    # Ignore errors here, because the cache entry only saves time.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(exist_ok=True)
        write_text(entry, digits)
    return digits


def _hash(versions: tuple[tuple[str, int, int, int], ...]) -> str:
    whole = sum(size for _, size, _, _ in versions) <= WHOLE_BYTES
    total = hashlib.blake2b(digest_size=16)
    for path, size, _, _ in versions:
        total.update(f"{Path(path).suffix}:{size}:".encode())
        with open(path, "rb", buffering=0) as file:
            if whole or size <= _BLOCKS * _BLOCK_BYTES:
                total.update(file.read())
                continue
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                total.update(file.read(_BLOCK_BYTES))
    return total.hexdigest()

"""The code that a sweep's jobs run: a copy made at submission, so that an edit reaches no job that is in the queue.

The copy holds the package and the YAMLs beside it. What other packages add through entry points is not in it: that is
run as it is installed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path

import titanlab
from titanlab.records.git_state import RECORD, git_state
from titanlab.records.provenance import code_fingerprint, redact
from titanlab.system.atomic_file import write_json

SCHEMA = 1
_FOLDERS = ("conf", "launch", "sweeps")
_TEXTS = (".yaml", ".yml", ".csv")
# Caches, and what editors leave beside a file for a moment.
_NO_CODE = ("__pycache__", "*.pyc", ".*", "*~")


def take(code: Path, *, package: Path | None = None) -> Path:
    """Copy the running installation into a folder named by its content, below `code`; at once if it is there.

    Args:
        code: the sweep's folder of snapshots.
        package: the folder of the package; None: the one that runs.
    """
    package = Path(titanlab.__file__).parent if package is None else package
    part = code / f".{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        _copy(package, part)
        # Of the copy, which nobody edits meanwhile.
        final = code / _digest(part)[:12]
        if not (final / RECORD).is_file():
            write_json(part / RECORD, _record(part, package))
            try:
                part.rename(final)
            except OSError:
                # Another process was faster.
                if not (final / RECORD).is_file():
                    raise
        return final
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fingerprint() -> str:
    """Of the code that runs now, as runs have it in their env.json."""
    return code_fingerprint(Path(titanlab.__file__).parent)


def _copy(package: Path, into: Path) -> None:
    shutil.copytree(package, into / "titanlab", ignore=shutil.ignore_patterns(*_NO_CODE))
    for name in _FOLDERS:
        # In a wheel they are inside the package.
        if (package.parent / name).is_dir() and not (package / "conf").is_dir():
            shutil.copytree(package.parent / name, into / name, ignore=_not_texts)


def _not_texts(folder: str, names: list[str]) -> set[str]:
    # launch/ may hold what a Slurm for tests has left: sockets, logs.
    return {
        name
        for name in names
        if name.startswith(".") or not (name.endswith(_TEXTS) or Path(folder, name).is_dir()) or name == "dev-slurm"
    }


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _record(copy: Path, package: Path) -> dict[str, object]:
    git = git_state(package)
    return {
        "schema": SCHEMA,
        "created": time.time(),
        "version": titanlab.__version__,
        "fingerprint": code_fingerprint(copy / "titanlab"),
        "git": None
        if git is None
        else {
            "sha": git.sha,
            "branch": git.branch,
            "dirty": git.dirty,
            "untracked": list(git.untracked),
            "patch_complete": git.patch_complete,
            "patch": redact(git.patch),
        },
    }

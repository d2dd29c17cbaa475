"""A copy of the code for a sweep's jobs, made at submission: later edits do not reach jobs in the queue."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path

import titanlab
from titanlab.records import RECORD, code_fingerprint, git_state, redact
from titanlab.system import write_json

SCHEMA = 1
_FOLDERS = ("conf", "launch", "sweeps")
_TEXTS = (".yaml", ".yml", ".csv")
_COMPILED = "__pycache__"
# Temporary files of editors, and what Python does not look for.
_NO_CODE = ("*.pyc", ".*", "*~")


def take(code: Path, *, package: Path | None = None) -> Path:
    """Copy the package and the YAML files beside it into `code`, named by their content, unless they are there.

    Packages that add options through entry points are not copied: jobs import them as they are installed.

    Args:
        package: the folder of the package; None: the package that runs.
    """
    package = Path(titanlab.__file__).parent if package is None else package
    part = code / f".{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        shutil.copytree(package, part / "titanlab", ignore=_not_code)
        for name in _FOLDERS:
            # In a wheel, these folders are inside the package.
            if (package.parent / name).is_dir() and not (package / "conf").is_dir():
                shutil.copytree(package.parent / name, part / name, ignore=_not_texts)
        # The digest of the copy: the original may be edited meanwhile.
        digest = hashlib.sha256()
        for path in sorted(path for path in part.rglob("*") if path.is_file() and path.parent.name != _COMPILED):
            digest.update(path.relative_to(part).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        final = code / digest.hexdigest()[:12]
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
    """The fingerprint of the code that runs now, as in the env.json of runs."""
    return code_fingerprint(Path(titanlab.__file__).parent)


def _not_code(folder: str, names: list[str]) -> set[str]:
    # Compiled modules are copied too, and are valid, as the copy keeps the times of the sources: otherwise each rank of
    # a job compiles all modules at once, and writes them.
    if Path(folder).name == _COMPILED:
        return {name for name in names if not name.endswith(".pyc")}
    return set(shutil.ignore_patterns(*_NO_CODE)(folder, names))


def _not_texts(folder: str, names: list[str]) -> set[str]:
    # launch/ may contain sockets and logs of a development Slurm.
    return {
        name
        for name in names
        if name.startswith(".") or not (name.endswith(_TEXTS) or Path(folder, name).is_dir()) or name == "dev-slurm"
    }


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

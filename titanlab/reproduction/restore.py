"""Makes a folder with a run's code: a git worktree of its commit with its difference, or a copy of the snapshot."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.records.provenance import code_fingerprint
from titanlab.reproduction.provenance import RecordedCode
from titanlab.system.command import Answer, ask

_SECONDS = 300.0
_SUFFIXES = (".py", ".yaml", ".yml", ".csv", ".json", ".txt", ".toml", ".typed")
# Nothing of a repository is run: no hook, no monitor of files, no command of an attribute.
_INERT = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "protocol.allow=never", "-c", "submodule.recurse=false"),
)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The restored code.

    Attributes:
        source: what it was made from, in words.
        is_same: whether it has the fingerprint of the run's code; None: the run has recorded none.
        notes: what could not be restored.
    """

    source: str
    is_same: bool | None
    notes: tuple[str, ...]


def repository_of(folder: Path) -> Path | None:
    """The root of the git repository that has a folder; None: there is none, or no git."""
    answer = _git(folder, "rev-parse", "--show-toplevel")
    return Path(answer.output.strip()) if answer is not None and answer.code == 0 and answer.output.strip() else None


def restore(code: RecordedCode, repository: Path | None, into: Path, *, run: str) -> Restored:
    """Make the folder.

    Args:
        run: the name of the run, for the error.

    Raises:
        ConfigError: neither the commit nor a snapshot is here, or git fails.
    """
    notes, has_commit = [], False
    if code.sha is None:
        notes.append("the code was installed without git, so there is no commit to go back to")
    elif repository is None:
        notes.append(f"commit {code.sha[:12]} cannot be looked up: there is no git repository here (--repo FOLDER)")
    else:
        answer = _git(repository, "cat-file", "-e", f"{code.sha}^{{commit}}")
        has_commit = answer is not None and answer.code == 0
        if not has_commit:
            notes.append(f"commit {code.sha[:12]} is not in {repository}: fetch it, or give --repo FOLDER")
    if has_commit and (code.problem is None or code.snapshot is None):
        assert repository is not None
        return _from_commit(code, repository, into, notes)
    if code.snapshot is None:
        reason = "; ".join([*notes, *([code.problem] if code.problem else [])])
        cure = f"install titanlab {code.version} by hand, or find the repository that has the commit"
        raise ConfigError("run", run, f"its code cannot be restored: {reason}; and no snapshot is kept", cure)
    if code.problem is not None:
        notes.append(code.problem)
    return _from_snapshot(code, code.snapshot, into, notes)


def _from_commit(code: RecordedCode, repository: Path, into: Path, notes: list[str]) -> Restored:
    assert code.sha is not None
    _checked(_git(repository, "worktree", "add", "--detach", "--", str(into), code.sha), "git worktree add", into)
    source = f"commit {code.sha[:12]}"
    if code.patch:
        with tempfile.NamedTemporaryFile("w", suffix=".patch", encoding="utf-8", newline="\n") as file:
            file.write(code.patch)
            file.flush()
            answer = _git(into, "apply", "--whitespace=nowarn", "--", file.name)
        if answer is None or answer.code:
            complaint = "git gave no answer" if answer is None else answer.complaint[:300]
            notes.append(f"code.patch does not fit the commit ({complaint}); the folder has the commit alone")
        else:
            source += " with code.patch"
    if code.problem is not None:
        notes.append(code.problem)
    return Restored(source=source, is_same=_is_same(code, into), notes=tuple(notes))


def _from_snapshot(code: RecordedCode, snapshot: Path, into: Path, notes: list[str]) -> Restored:
    into.mkdir(parents=True, exist_ok=True)
    shutil.copytree(snapshot, into, dirs_exist_ok=True, symlinks=True, ignore=_no_plain_files)
    return Restored(source=f"the snapshot {snapshot}", is_same=_is_same(code, into), notes=tuple(notes))


def _no_plain_files(folder: str, names: list[str]) -> set[str]:
    """What is not copied: links, pipes, and files of other kinds than a snapshot has."""
    left = set()
    for name in names:
        path = Path(folder, name)
        is_plain = path.is_file() and path.suffix in _SUFFIXES
        if path.is_symlink() or name.startswith(".") or not (path.is_dir() or is_plain):
            left.add(name)
    return left


def _is_same(code: RecordedCode, folder: Path) -> bool | None:
    return None if code.fingerprint is None else code_fingerprint(folder / "titanlab") == code.fingerprint


def _checked(answer: Answer | None, what: str, into: Path) -> None:
    if answer is None or answer.code:
        rule = "git gave no answer" if answer is None else f"{what} says: {answer.complaint[:300]}"
        raise ConfigError("--into", into, rule, "give another folder")


def _git(folder: Path, *arguments: str) -> Answer | None:
    # Git sets GIT_DIR and similar variables for hooks; they would select another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    return ask("git", "-C", str(folder), *_INERT, *arguments, seconds=_SECONDS, environ=environ)

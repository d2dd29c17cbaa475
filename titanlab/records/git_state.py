"""The state of the git repository that has a package's code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from titanlab.system.files import read_text
from titanlab.system.processes import output_of

# In a snapshot of the code, this file has the git state of the repository that was copied.
RECORD = "code.json"
PATCH_LIMIT = 1_000_000
_UNTRACKED_LIMIT = 100
_FILE_LIMIT = 200_000
_TIMEOUT_SECONDS = 5.0
_CODE_SUFFIXES = (".py", ".yaml", ".yml", ".toml")


@dataclass(frozen=True, kw_only=True)
class GitState:
    """The commit, and how the code differs from it.

    Attributes:
        sha: the commit; None in a repository without commits.
        branch: None for a detached HEAD.
        dirty: whether tracked files differ from the commit, or there is untracked code.
        untracked: untracked files with code.
        patch: `git apply` of it to the commit gives this code, with the untracked code.
        patch_complete: False if size or time has cut the patch off.
    """

    sha: str | None
    branch: str | None
    dirty: bool
    untracked: tuple[str, ...]
    patch: str
    patch_complete: bool


def git_state(package: Path) -> GitState | None:
    """The state of the repository that tracks a package; for a snapshot, the state recorded when it was made.

    None: the package is installed (also in a `.venv` inside another project's repository), or git is missing or slow.
    """
    root = package.resolve().parent
    if (root / RECORD).is_file():
        return _recorded(root / RECORD)
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root:
        return None
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = _git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    untracked = tuple(name for name in listed.split("\0") if name.endswith(_CODE_SUFFIXES))
    changed = _git(root, "diff", "--no-color", "--no-ext-diff", "HEAD") if sha else ""
    patch, complete = _patch(root, changed, untracked)
    return GitState(
        sha=sha.strip() if sha else None,
        branch=branch.strip() if branch else None,
        dirty=bool(untracked) or changed != "",
        untracked=untracked[:_UNTRACKED_LIMIT],
        patch=patch,
        patch_complete=complete,
    )


def _recorded(record: Path) -> GitState | None:
    try:
        git = json.loads(read_text(record)).get("git")
        known = {field.name: git[field.name] for field in fields(GitState)} if git else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return None if known is None else GitState(**{**known, "untracked": tuple(known["untracked"])})


def _patch(root: Path, changed: str | None, untracked: Sequence[str]) -> tuple[str, bool]:
    complete = changed is not None and len(untracked) <= _UNTRACKED_LIMIT
    patch = changed or ""
    for name in untracked[:_UNTRACKED_LIMIT]:
        if len(patch) > PATCH_LIMIT:
            break
        added = _as_added(root, name)
        complete = complete and added is not None
        patch += added or ""
    if len(patch) > PATCH_LIMIT:
        patch, complete = patch[:PATCH_LIMIT].rpartition("\n")[0] + "\n", False
    return patch, complete


def _as_added(root: Path, name: str) -> str | None:
    """The patch that adds one file, as git writes it; None for a large file, or for a file that is no text."""
    path = root / name
    try:
        if path.stat().st_size > _FILE_LIMIT:
            return None
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    last = "" if lines[-1] == "" else "\\ No newline at end of file\n"
    lines = lines if last else lines[:-1]
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not lines:
        return head
    body = "".join(f"+{line}\n" for line in lines)
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{last}"


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it failed, took too long or git is not installed."""
    # Git sets GIT_DIR and similar variables for hooks; they would select another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Without this, git would lock the index, and the user's own git commands could fail.
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # git refuses a repository of another owner, whose settings could run programs. Its code runs here all the same.
    trusted = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    return output_of("git", *trusted, "-C", str(root), *arguments, seconds=_TIMEOUT_SECONDS, environ=environ)

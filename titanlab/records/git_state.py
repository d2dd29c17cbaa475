"""The state of the git repository that a package's code stands in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from titanlab.system.command import output_of

# What a snapshot of the code says about the repository that it was taken from.
RECORD = "code.json"
PATCH_LIMIT = 1_000_000
_UNTRACKED_LIMIT = 100
_FILE_LIMIT = 200_000
_TIMEOUT_SECONDS = 5.0
_CODE_SUFFIXES = (".py", ".yaml", ".yml", ".toml")


@dataclass(frozen=True, kw_only=True)
class GitState:
    """Commit and difference to it.

    Attributes:
        sha: the commit; None in a repository without one.
        branch: None for a detached commit.
        dirty: whether tracked files differ from the commit, or code lies beside them untracked.
        untracked: such files, code only.
        patch: what `git apply` makes the commit this code with; untracked code included.
        patch_complete: False where the patch was cut off, for size or time.
    """

    sha: str | None
    branch: str | None
    dirty: bool
    untracked: tuple[str, ...]
    patch: str
    patch_complete: bool


def git_state(package: Path) -> GitState | None:
    """The state of the repository that tracks a package, or None: an installed one, no git, no time.

    A package installed somewhere inside another's repository (a `.venv` in a project) is not that
    project's code. For a snapshot it is what was recorded when that was taken.
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
        git = json.loads(record.read_text(encoding="utf-8")).get("git")
        known = {each.name: git[each.name] for each in fields(GitState)} if git else None
    except (OSError, ValueError, KeyError, AttributeError):
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
    """The patch that adds one file, as git writes it; None for what is no text of moderate size."""
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
    """Output of a git command, or None where it failed, took too long or is not installed."""
    # GIT_DIR and its like, which git sets for hooks, would point it to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # No lock on the index: a run must not get in the way of a person's own git.
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return output_of("git", "-C", str(root), *arguments, seconds=_TIMEOUT_SECONDS, environ=environ)

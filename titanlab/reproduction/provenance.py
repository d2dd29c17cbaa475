"""What a run has recorded about its code, with every value checked: the folder may be a stranger's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.git_state import PATCH_LIMIT, RECORD
from titanlab.records.json_file import read_optional
from titanlab.records.run_folder import RunFolder
from titanlab.system.regular_file import read_bytes

_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_HIDDEN = "[hidden]"
# Lines of a patch that name files; a name with special characters is in quotation marks.
_NAMES = re.compile(
    r"^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to |diff --git |Binary files )(.*)$", re.MULTILINE
)
_LINK = re.compile(r"^(?:new file mode|new mode|index \S+) 1(?:2|6)0000\r?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class RecordedCode:
    """The code of an attempt.

    Attributes:
        env: the content of env.json.
        sha: the commit; None: not recorded.
        branch: for the user.
        fingerprint: of the Python files of the package; None: not recorded.
        version: of the package.
        patch: the difference to the commit; empty: none.
        problem: why the patch cannot be used, or is not all; None: it is whole.
        snapshot: a copy of the same code in the sweep's folder; None: there is none.
    """

    env: Mapping[str, Any]
    sha: str | None
    branch: str | None
    fingerprint: str | None
    version: str
    patch: str
    problem: str | None
    snapshot: Path | None


def recorded_code(run: RunFolder, attempt: int) -> RecordedCode:
    """What an attempt has recorded.

    Raises:
        ConfigError: it has recorded nothing.
    """
    env = run.env(attempt) if attempt else run.env()
    code = (env or {}).get("code")
    if env is None or not isinstance(code, dict):
        rule = "has recorded no code: it has no env.json, or a damaged one"
        raise ConfigError("run", run.path, rule, "name a run that has begun")
    recorded = code.get("git")
    git: Mapping[str, Any] = recorded if isinstance(recorded, dict) else {}
    sha, fingerprint = git.get("sha"), code.get("fingerprint")
    fingerprint = fingerprint if isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint) else None
    patch, problem = _patch(run, attempt, git)
    return RecordedCode(
        env=env,
        # A value such as `--upload-pack=…` would be an option of git.
        sha=sha if isinstance(sha, str) and _SHA.fullmatch(sha) else None,
        branch=git.get("branch") if isinstance(git.get("branch"), str) else None,
        fingerprint=fingerprint,
        version=str(code.get("version", "unknown"))[:40],
        patch=patch,
        problem=problem,
        snapshot=_snapshot(run.path.parent / "code", fingerprint),
    )


def _patch(run: RunFolder, attempt: int, git: Mapping[str, Any]) -> tuple[str, str | None]:
    if not git.get("dirty"):
        return "", None
    if not git.get("patch"):
        return "", "the code was changed, and the difference was not kept"
    try:
        # Line ends as they are: git compares them with those of the commit.
        text = read_bytes(run.attempt_folder(attempt) / "code.patch", most_bytes=4 * PATCH_LIMIT).decode()
    except (OSError, UnicodeDecodeError) as error:
        return "", f"the code was changed, and code.patch cannot be read ({error})"
    if (wrong := wrong_path(text)) is not None:
        return "", f"code.patch is not applied: {wrong}"
    if not git.get("patch_complete"):
        return text, "the code was changed by more than code.patch holds"
    if _HIDDEN in text:
        return text, "what looked like a secret was taken out of code.patch"
    return text, None


def wrong_path(patch: str) -> str | None:
    """What is wrong with the files that a patch changes; None: they are plain files below its root."""
    if _LINK.search(patch):
        return "it makes a link or a submodule"
    for match in _NAMES.finditer(patch):
        for name in re.split(r"[\s\"]+", match[1]):
            parts = name.split("/")
            # Git refuses such paths too.
            if name.startswith("/") and name != "/dev/null":
                return f"it names {name[:80]!r}, which is no path below the repository"
            if ".." in parts or any(part.lower().startswith(".git") and part != ".gitignore" for part in parts):
                return f"it names {name[:80]!r}"
    return None


def _snapshot(folder: Path, fingerprint: str | None) -> Path | None:
    """The copy of the code with this fingerprint in the sweep's folder."""
    if fingerprint is None or folder.is_symlink() or not folder.is_dir():
        return None
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if (read_optional(path / RECORD) or {}).get("fingerprint") == fingerprint:
            return path
    return None

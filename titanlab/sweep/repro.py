"""Restores a run's code in a git worktree, and its config; reports what differs from the present.

Nothing in the run's folder is executed: git runs without hooks, and files are parsed as data. All paths and recorded
values are checked, because the folder may be a stranger's.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import Loader, from_mapping, literal, read_flags, resolve, to_mapping
from titanlab.records import PATCH_LIMIT, RECORD, RunFolder, code_fingerprint, config_text, read_optional
from titanlab.sweep.composer import Composer
from titanlab.sweep.request import choose_defaults
from titanlab.sweep.space import differing
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system import CommandResult, read_bytes, run_command

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
        sha: the commit; None: not recorded.
        fingerprint: hash of the Python files of the package; None: not recorded.
        patch: the difference to the commit; empty: none.
        problem: why the patch cannot be used, or is incomplete; None: it is complete.
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
    """The code that an attempt has recorded.

    Raises:
        ConfigError: the attempt has recorded no code.
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
    snapshot, folder = None, run.path.parent / "code"
    if fingerprint is not None and folder.is_dir() and not folder.is_symlink():
        for path in sorted(folder.iterdir()):
            is_record = not path.name.startswith(".") and not path.is_symlink()
            if is_record and (read_optional(path / RECORD) or {}).get("fingerprint") == fingerprint:
                snapshot = snapshot or path
    return RecordedCode(
        env=env,
        # Git would take a value such as `--upload-pack=…` as an option.
        sha=sha if isinstance(sha, str) and _SHA.fullmatch(sha) else None,
        branch=git.get("branch") if isinstance(git.get("branch"), str) else None,
        fingerprint=fingerprint,
        version=str(code.get("version", "unknown"))[:40],
        patch=patch,
        problem=problem,
        snapshot=snapshot,
    )


def _patch(run: RunFolder, attempt: int, git: Mapping[str, Any]) -> tuple[str, str | None]:
    if not git.get("dirty"):
        return "", None
    if not git.get("patch"):
        return "", "the code was changed, and the difference was not kept"
    try:
        # Keep line ends: git compares them with the commit's.
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
                return f"it names {name[:80]!r}, which is not a path below the repository"
            if ".." in parts or any(part.lower().startswith(".git") and part != ".gitignore" for part in parts):
                return f"it names {name[:80]!r}"
    return None


_SECONDS = 300.0
_SUFFIXES = (".py", ".yaml", ".yml", ".csv", ".json", ".txt", ".toml", ".typed")
# Run nothing that the repository configures: no hook, no file monitor, no command of a git attribute.
_INERT = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "protocol.allow=never", "-c", "submodule.recurse=false"),
)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The restored code.

    Attributes:
        is_same: whether the restored code has the run's fingerprint; None: the run has recorded none.
    """

    source: str
    is_same: bool | None
    notes: tuple[str, ...]


def repository_of(folder: Path) -> Path | None:
    """The root of the git repository that contains a folder; None: there is no repository, or git is not installed."""
    answer = _git(folder, "rev-parse", "--show-toplevel")
    return Path(answer.output.strip()) if answer is not None and answer.code == 0 and answer.output.strip() else None


def restore(code: RecordedCode, repository: Path | None, into: Path, *, run: str) -> Restored:
    """Restore the code into the folder `into`.

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
        assert repository is not None and code.sha is not None  # noqa: PT018
        answer = _git(repository, "worktree", "add", "--detach", "--", str(into), code.sha)
        if answer is None or answer.code:
            said = "git gave no answer" if answer is None else f"git worktree add says: {answer.complaint[:300]}"
            raise ConfigError("--into", into, said, "give another folder")
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
    elif code.snapshot is not None:
        into.mkdir(parents=True, exist_ok=True)
        shutil.copytree(code.snapshot, into, dirs_exist_ok=True, symlinks=True, ignore=_no_plain_files)
        source = f"the snapshot {code.snapshot}"
    else:
        reason = "; ".join([*notes, *([code.problem] if code.problem else [])])
        cure = f"install titanlab {code.version} by hand, or find the repository that has the commit"
        raise ConfigError("run", run, f"its code cannot be restored: {reason}; and no snapshot is kept", cure)
    if code.problem is not None:
        notes.append(code.problem)
    is_same = None if code.fingerprint is None else code_fingerprint(into / "titanlab") == code.fingerprint
    return Restored(source=source, is_same=is_same, notes=tuple(notes))


def _no_plain_files(folder: str, names: list[str]) -> set[str]:
    """Names that are not copied: links, pipes, and kinds of files that a snapshot does not have."""
    left = set()
    for name in names:
        path = Path(folder, name)
        is_plain = path.is_file() and path.suffix in _SUFFIXES
        if path.is_symlink() or name.startswith(".") or not (path.is_dir() or is_plain):
            left.add(name)
    return left


def _git(folder: Path, *arguments: str) -> CommandResult | None:
    # Git sets GIT_DIR and similar variables for hooks; they would select another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    return run_command("git", "-C", str(folder), *_INERT, *arguments, seconds=_SECONDS, environ=environ)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
# Prefixes of variables that are not compared: these differ between any two runs, or name the job.
_OWN = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
_LONGEST = 60


# Section of env.json → the names to compare; None: all.
_COMPARED: Mapping[str, tuple[str, ...] | None] = {
    "python": ("version", "implementation"),
    "devices": ("accelerator", "name", "count"),
    "platform": ("system", "machine", "libc", "release", "nvidia_driver"),
    "host": ("name", "cpu", "usable_cores", "memory_gib"),
    "packages": None,
    "environment": None,
}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value then, value now) for each recorded fact that differs."""
    found = []
    for section, keys in _COMPARED.items():
        old, new = _mapping(then, section), _mapping(now, section)
        names = sorted({*old, *new}, key=str) if keys is None else [key for key in keys if key in old]
        for name in names:
            if old.get(name) != new.get(name) and not (keys is None and str(name).startswith(_OWN)):
                label = str(name)[:_LONGEST] if keys is None else f"{section}.{name}"
                found.append((label, _text(old.get(name)), _text(new.get(name))))
    return found


def pip_line(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The command that installs the packages that differ; None: none differs, or they cannot be named safely."""
    old, new = _mapping(then, "packages"), _mapping(now, "packages")
    words = [
        f"{name}=={version}"
        for name, version in sorted(old.items(), key=str)
        # The record may be a stranger's: a name could be an option of pip, or a command for the shell.
        if _NAME.fullmatch(str(name)) and _VERSION.fullmatch(str(version)) and version not in (None, new.get(name))
    ]
    return f"pip install {' '.join(words)}" if words else None


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    text = "-" if value is None else " ".join(str(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


NAME = "run"
# These keys say where a run is, not what it computes.
_PLACES = ("runs", "sweep", "name")


def composable(config: Mapping[str, Any]) -> str:
    """The text of a YAML file from which Hydra composes a run's recipe: a list of schemas, and all values.

    Raises:
        ConfigError: an option is not installed here, or a value breaks a rule.
    """
    recipe = to_mapping(from_mapping(config))
    defaults: list[Any] = ["recipe_schema"]
    for group, kinds in discover().items():
        value = recipe.get(group)
        if isinstance(value, dict):
            kind = None if None in kinds else value.get("kind")
            defaults.append({group: kinds[kind].schema_name})
    values = {key: value for key, value in recipe.items() if key != "runs"}
    text = config_text({"defaults": [*defaults, "_self_"], "runs": "runs", **literal(values)})
    return f"# The resolved recipe of a run; `titanlab repro` wrote it.\n{text}"


def config_differences(run: RunFolder, env: Mapping[str, Any]) -> list[tuple[str, str, str]] | str:
    """(key, value then, value now) where a run's sweep or command now composes another value; or why it composes none.

    The run's name and folders (`_PLACES`) are not compared.
    """
    sweep = SweepFolder(run.path.parent)
    manifest, rows = sweep.manifest(), sweep.points()
    overrides = manifest.get("overrides")
    point = next((row.get("point") for row in rows if row.get("run") == run.path.name), None)
    try:
        if isinstance(overrides, list) and isinstance(point, dict):
            shared = [text for text in overrides if isinstance(text, str) and "=" in text]
            loader = Loader(read_flags(shared), shared)
            # `base` reads the options that all points share, which decides how a point's values are set.
            loader.base()
            # Without a space, the run may be a single run, which does not get a sweep's default options.
            if manifest.get("space") is not None:
                points = [row["point"] for row in rows if isinstance(row.get("point"), dict)]
                choose_defaults(loader, points, measured=True)
            recipe = Composer(loader, [point]).recipe(point)
        else:
            arguments, problem = _overrides(env)
            composed = None if problem else Loader(read_flags(arguments), arguments).recipe()
            if composed is None:
                return problem or "its command describes several runs"
            recipe = composed
        cluster = run.section("cluster")
        accelerator, device = str(cluster.get("accelerator") or "cpu"), str(cluster.get("device") or "cpu")
        now = to_mapping(resolve(recipe, world=None, accelerator=accelerator, device=device))
        return differing(run.config(), now, _PLACES)
    except ConfigError as error:
        return f"what made it composes to no recipe any more ({error})"


def _overrides(env: Mapping[str, Any]) -> tuple[list[str], str]:
    """The overrides of a command line, or why they are not known."""
    command = env.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if "train" not in words or "--from" in words:
        return [], "its command line is not recorded in a form that can be composed again"
    arguments = words[words.index("train") + 1 :]
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    if len(overrides) < len(arguments):
        return [], f"its command line has flags: {' '.join(word for word in arguments if word not in overrides)}"
    if any("[hidden]" in word for word in overrides):
        return [], "its command line had a secret, which was not recorded"
    return overrides, ""


def write_config(folder: Path, text: str) -> None:
    """Write the composable config into a restored folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.yaml").write_text(text, encoding="utf-8")

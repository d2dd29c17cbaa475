"""Finds what `titanlab clean` may remove from a folder of runs, with sizes, and removes it.

Results are never touched. A checkpoint stays if `resume` or the rules of its recipe need it. A removal never goes
outside its root and never follows a link.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.checkpoint import (
    PART,
    ListedCheckpoint,
    StorePath,
    checkpoints_of,
    is_address,
    list_checkpoints,
    read_contents,
)
from titanlab.errors import ConfigError
from titanlab.launch import may_work
from titanlab.records import RECORD, OutcomeKind, RunFolder, read_optional
from titanlab.sweep.reconcile import ACTIVE
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system import read_bytes, user_path

KINDS = {
    "checkpoints": "older than resume and the rules of checkpoint.keep need, put aside, or damaged",
    "superseded": "checkpoints, traces and tokenizers of runs that were done anew; their records stay",
    "temporary": "left by interrupted saves, submissions and removals",
    "code": "copies of the code that no unfinished run uses",
}
# Matches the temporary names that `create_run`, `write_text`, `take_snapshot` and `remove_item` give.
TEMPORARY = re.compile(r"\..+\.(?:part|tmp|removing)")
# Keep younger temporary items: a process may still be writing them.
YOUNG_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Removable:
    """A file or a folder that can be removed.

    Attributes:
        kind: one of KINDS.
        root: the folder that must contain the path, after all links are followed.
        run: the run that must be idle while the path is removed; None: the path belongs to no run.
    """

    kind: str
    path: Path
    root: Path
    bytes: int
    run: RunFolder | None = None


class Refused(Exception):
    """Raised if an item is left alone; the message says why, in one line."""


def item(kind: str, path: Path, root: Path, run: RunFolder | None = None) -> Removable | None:
    """The item of a path; None if the path is a link, is missing, or lies outside its root."""
    if path.is_symlink() or not os.path.lexists(path) or not is_within(path, root):
        return None
    return Removable(kind=kind, path=path, root=root, bytes=size_of_tree(path), run=run)


def is_within(path: Path, root: Path) -> bool:
    """Whether a path lies below a root, after the links in its parent folder are followed."""
    try:
        parent, real = path.parent.resolve(), root.resolve()
    except (OSError, RuntimeError):
        return False
    return (parent == real or parent.is_relative_to(real)) and parent / path.name != real


def size_of_tree(path: Path) -> int:
    """Bytes of the files in a folder, or of a file; does not follow links, and skips files that vanish meanwhile."""
    total, inside = 0, [] if os.path.islink(path) else os.walk(path)
    for file in [str(path), *(os.path.join(folder, name) for folder, _, names in inside for name in names)]:
        with contextlib.suppress(OSError):
            status = os.lstat(file)
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def is_old(path: Path) -> bool:
    """Whether nothing was written to a file, or directly into a folder, for an hour."""
    try:
        inside = [] if path.is_symlink() or not path.is_dir() else list(path.iterdir())
        newest = max(file.lstat().st_mtime for file in [path, *inside])
    except OSError:
        return False
    return time.time() - newest > YOUNG_SECONDS


def remove_item(entry: Removable) -> None:
    """Remove an item; raises Refused. Claims the item's run during the rename: no process can then begin the run."""
    path = entry.path
    try:
        claim = contextlib.nullcontext() if entry.run is None else entry.run.claim()
        if path.is_symlink() or not is_within(path, entry.root):
            raise Refused("it is a link now, or lies elsewhere")
        away = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.removing")
        with claim:
            path.rename(away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away)
        else:
            away.unlink()
    except FileNotFoundError:
        return  # Another process has removed it.
    except ConfigError as error:
        raise Refused(error.rule) from None
    except OSError as error:
        raise Refused(error.strerror or type(error).__name__) from None


def removable(
    run: RunFolder, place: Path, *, keep: int | None, verifies: bool, named: Collection[str] = ()
) -> list[ListedCheckpoint]:
    """The checkpoints of a run that can be removed.

    The newest intact checkpoint always stays, also if newer ones are damaged; so does the newest intact one with the
    optimizer's state. If no checkpoint is intact, all stay.

    Args:
        keep: how many of the newest checkpoints stay; None: checkpoint.keep, and 1 for a run that is done.
        verifies: read every byte of the checkpoints that stay, not only index and sizes.
        named: real paths of checkpoints from which other runs start.
    """
    rows = list_checkpoints(place, verifies=verifies)
    whole = [row for row in rows if row.state == "complete" and row.problem is None]
    if not whole:
        return []
    rules = run.section("checkpoint")
    # In a damaged recipe these values may have any type.
    given, every = (
        value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
        for value in (rules.get("keep", 2), rules.get("keep_every"))
    )
    if keep is None:
        result = run.result()
        is_done = result is not None and result.kind is OutcomeKind.DONE
        # `checkpoint.keep: 0` keeps all checkpoints.
        keep = len(whole) if given == 0 else 1 if is_done else given
    stay = {row.name for age, row in enumerate(reversed(whole)) if age < keep or (every and row.step % every == 0)}
    stay.add(whole[-1].name)
    for row in reversed(whole):
        # Keep the newest checkpoint with more than the model: a run can resume from it.
        with contextlib.suppress(ConfigError):
            if read_contents(place / row.name, "run").saved.contents is None:
                stay.add(row.name)
                break

    def is_named(row: ListedCheckpoint) -> bool:
        text = str((place / row.name).resolve())
        # `load_from` may also name the run, or its folder of checkpoints.
        return any(f"{text}/".startswith(f"{name}/") for name in named)

    return [row for row in rows if row.name not in stay and row.state != "unfinished" and not is_named(row)]


_BULKY = ("checkpoints", "traces", "tokenizer")
# Parse only files in which one of these keys has a value: parsing YAML takes a thousand times as long as the search.
_STARTS = re.compile(rb"^(?:init_from|\s+load_from): *(?!null\s)\S", re.MULTILINE)
_CONFIG_BYTES = 1 << 20
# A run counts as busy if it wrote its status within this time: it may run on a host whose locks are not seen here.
_SILENT_SECONDS = 900.0
# Folders of a run in which to look for temporary files, besides the run's own folder.
_RUN_FOLDERS = ("attempts", "checkpoints", "logs", "traces")


@dataclass
class Survey:
    """Finds what can be removed under a root, and lists what is left alone.

    Attributes:
        busy: runs that are running or queued; they are left alone.
        notes: lines about what else was left alone.
    """

    root: Path
    keep: int | None = None
    verifies: bool = False
    items: list[Removable] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def look(self, sweeps: list[SweepFolder], only: RunFolder | None, report: Callable[[str], None]) -> None:
        """Look through sweeps, or through one run.

        Args:
            only: look only at this run's checkpoints and temporary files; None: at everything.
            report: called with a line if the results of ended runs cannot be written.
        """
        named = starting_points(self.root)
        for sweep in sweeps:
            if sweep.path.is_symlink() or not is_within(sweep.path, self.root):
                self.notes.append(f"{sweep.name} is a link, and is left alone")
                continue
            try:
                busy = _busy(sweep, report)
            except ConfigError as error:
                # The plan is damaged, or a launcher is not installed: it is unknown which runs have jobs.
                self.notes.append(f"{sweep.name} is left alone: {error}")
                continue
            for run in sweep.runs() if only is None else [sweep.run(only.path.name)]:
                if run.path.name in busy:
                    self.busy.append(f"{sweep.name}/{run.path.name}")
                elif run.path.is_symlink():
                    self.notes.append(f"{sweep.name}/{run.path.name} is a link, and is left alone")
                else:
                    self._look_at_run(run, named)
            if only is None:
                for folder in _inside(sweep.superseded):
                    superseded = RunFolder(folder)
                    if folder.is_symlink() or not folder.is_dir() or superseded.is_claimed():
                        continue
                    for path in (folder / name for name in _BULKY):
                        is_needed = any(start.startswith(str(path.resolve())) for start in named)
                        if not is_needed and _inside(path):
                            self._add("superseded", path, superseded)
                self._look_at_code(sweep, busy)
                self._add_temporary(sweep.path)
                self._add_temporary(sweep.code)

    def _add(self, kind: str, path: Path, run: RunFolder | None = None) -> None:
        if (entry := item(kind, path, self.root, run)) is not None:
            self.items.append(entry)

    def _look_at_run(self, run: RunFolder, named: frozenset[str]) -> None:
        name = f"{run.path.parent.name}/{run.path.name}"
        try:
            run.check_files()
            place = checkpoints_of(run)
            if isinstance(place, StorePath):
                self.notes.append(f"{name} has its checkpoints in {place}: left alone")
            elif place.is_symlink() or not is_within(place / "x", self.root):
                self.notes.append(f"{name}/checkpoints is a link, and is left alone")
            else:
                for row in removable(run, place, keep=self.keep, verifies=self.verifies, named=named):
                    self._add("checkpoints", place / row.name, run)
                for part in sorted(place.glob(f"step-*{PART}")):
                    if is_old(part):
                        self._add("temporary", part, run)
        except ConfigError as error:
            self.notes.append(f"{name} is left alone: {error}")
            return
        inner = (run.path / folder_name for folder_name in _RUN_FOLDERS)
        for folder in (run.path, *inner, *_inside(run.path / "attempts")):
            self._add_temporary(folder, run)

    def _look_at_code(self, sweep: SweepFolder, busy: set[str]) -> None:
        """Add the snapshots that no unfinished run uses and that are not the only copy of a run's code."""
        runs = {run.path.name: run for run in sweep.runs()}
        used, only_copies = set(), set()
        for submission in sweep.submissions():
            if any(run in busy or (run in runs and not _has_ended(runs[run])) for run in submission.runs):
                used.add(Path(submission.code).name)
        for run in runs.values():
            code = (run.env() or {}).get("code")
            if isinstance(code, dict):
                git = code.get("git")
                # With a commit in git and a complete patch in the run, the snapshot is not the only copy.
                if not (isinstance(git, dict) and git.get("sha") and git.get("patch_complete") is True):
                    # Convert to text: a damaged record may hold a list, which a set cannot contain.
                    only_copies.add(str(code.get("fingerprint")))
        for folder in _inside(sweep.code):
            record = read_optional(folder / RECORD) or {}
            is_used = folder.name in used or str(record.get("fingerprint")) in only_copies
            if record and not folder.name.startswith(".") and not is_used and is_old(folder):
                self._add("code", folder)

    def _add_temporary(self, folder: Path, run: RunFolder | None = None) -> None:
        for path in _inside(folder):
            if TEMPORARY.fullmatch(path.name) and is_old(path):
                self._add("temporary", path, run)


def _busy(sweep: SweepFolder, report: Callable[[str], None]) -> set[str]:
    """Names of the runs that are running or queued, or that may be running on another host."""
    seconds = _SILENT_SECONDS
    busy = {
        run.path.name
        for run in sweep.runs()
        if run.is_claimed() or may_work(run.known_status(), silent_seconds=seconds, here_seconds=seconds)
    }
    if sweep.submissions():
        rows = look_at(sweep, report)()
        busy |= {str(row["run"]) for row in rows if row["state"] in (*ACTIVE, "queued")}
    return busy


def _inside(folder: Path) -> list[Path]:
    """The contents of a folder; empty if the folder is a link, or cannot be read."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


def _has_ended(run: RunFolder) -> bool:
    """Whether a run has ended and will not go back into the queue by itself."""
    try:
        result = run.result()
    except ConfigError:
        return False
    return result is not None and not result.kind.automatic


def starting_points(root: Path) -> frozenset[str]:
    """Real paths of the checkpoints, or folders of checkpoints, from which runs under the root start."""
    named = set()
    for path in root.glob("*/*/config.yaml"):
        # Another user may have written hostile text: a path with a zero byte, or links that form a ring.
        with contextlib.suppress(ConfigError, OSError, RuntimeError, ValueError):
            if _STARTS.search(read_bytes(path, most_bytes=_CONFIG_BYTES)):
                run = RunFolder(path.parent)
                for text in (run.config().get("init_from"), run.section("checkpoint").get("load_from")):
                    if isinstance(text, str) and text and not is_address(text):
                        named.add(str(user_path(text).resolve()))
    return frozenset(named)

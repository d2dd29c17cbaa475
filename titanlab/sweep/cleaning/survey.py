"""Looks through a folder of runs for what can be removed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.checkpoint.folders import PART
from titanlab.checkpoint.remote.address_schema import StorePath, is_address
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.errors import ConfigError
from titanlab.records.git_state import RECORD
from titanlab.records.json_file import read_optional
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.cleaning.item import TEMPORARY, Item, is_old, is_within, item
from titanlab.sweep.cleaning.old_checkpoints import removable
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.sweep.table.listing import ACTIVE
from titanlab.sweep.table.look import look_at
from titanlab.system.disk import StoreFault
from titanlab.system.regular_file import read_bytes
from titanlab.system.user_path import user_path

_BULKY = ("checkpoints", "traces", "tokenizer")
# Read as YAML are only files in which one of them has a value: that takes a thousand times as long.
_STARTS = re.compile(rb"^(?:init_from|\s+load_from): *(?!null\s)\S", re.MULTILINE)
_CONFIG_BYTES = 1 << 20
# A run that has written its status within this time may be at work on another host, whose locks are not seen here.
_FRESH_SECONDS = 900.0
# A shorter list is no list of all files of a run's folder, at its top.
_RUN_FOLDERS = ("attempts", "checkpoints", "logs", "traces")


@dataclass
class Survey:
    """What was found.

    Attributes:
        root: the folder of runs.
        items: what can be removed.
        busy: runs that work or wait, which are left alone.
        notes: lines about what else was left alone.
    """

    root: Path
    keep: int | None = None
    verifies: bool = False
    is_remote: bool = False
    items: list[Item] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def look(self, sweeps: list[SweepFolder], only: RunFolder | None, report: Callable[[str], None]) -> None:
        """Look through sweeps, or through one run.

        Args:
            only: the only run whose checkpoints and temporary files are wanted.
            report: called with a line for each job whose end cannot be recorded.
        """
        named = starting_points(self.root)
        for sweep in sweeps:
            if sweep.path.is_symlink() or not is_within(sweep.path, self.root):
                self.notes.append(f"{sweep.name} is a link, and is left alone")
                continue
            try:
                busy = self._busy(sweep, report)
            except ConfigError as error:
                # Its plan or a submission is damaged: which of its runs have jobs is not known.
                self.notes.append(f"{sweep.name} is left alone: {error}")
                continue
            for run in sweep.runs() if only is None else [RunFolder(sweep.path / only.path.name)]:
                if run.path.name in busy:
                    self.busy.append(f"{sweep.name}/{run.path.name}")
                elif run.path.is_symlink():
                    self.notes.append(f"{sweep.name}/{run.path.name} is a link, and is left alone")
                else:
                    self._look_at_run(run, named)
            if only is None:
                self._look_at_superseded(sweep, named)
                self._look_at_code(sweep, busy)
                self._add_temporary(sweep.path)
                self._add_temporary(sweep.code)

    def _add(self, kind: str, path: Path, run: RunFolder | None = None) -> None:
        if (entry := item(kind, path, self.root, run)) is not None:
            self.items.append(entry)

    def _busy(self, sweep: SweepFolder, report: Callable[[str], None]) -> set[str]:
        """The runs that work, wait, or may do so on another host."""
        now = time.time()
        busy = set()
        for run in sweep.runs():
            status = run.known_status()
            is_fresh = status is not None and status.state in ACTIVE and now - status.updated < _FRESH_SECONDS
            if run.is_claimed() or is_fresh:
                busy.add(run.path.name)
        if sweep.submissions():
            rows = look_at(sweep, report)()
            busy |= {str(row["run"]) for row in rows if row["state"] in (*ACTIVE, "queued")}
        return busy

    def _look_at_run(self, run: RunFolder, named: frozenset[str]) -> None:
        name = f"{run.path.parent.name}/{run.path.name}"
        try:
            run.check_files()
            place = checkpoints_of(run)
            if isinstance(place, StorePath) and not self.is_remote:
                self.notes.append(f"{name} has its checkpoints in {place}: left alone; --remote looks there too")
            elif not isinstance(place, StorePath) and (place.is_symlink() or not is_within(place / "x", self.root)):
                self.notes.append(f"{name}/checkpoints is a link, and is left alone")
            else:
                self._add_checkpoints(run, named)
        except (ConfigError, StoreFault) as error:
            self.notes.append(f"{name} is left alone: {error}")
            return
        for folder in (run.path, *(run.path / folder_name for folder_name in _RUN_FOLDERS)):
            self._add_temporary(folder, run)
        with contextlib.suppress(OSError):
            for attempt in (run.path / "attempts").iterdir():
                self._add_temporary(attempt, run)

    def _add_checkpoints(self, run: RunFolder, named: frozenset[str]) -> None:
        place = checkpoints_of(run)
        for row in removable(run, place, keep=self.keep, verifies=self.verifies, named=named):
            path = place / row.name
            if isinstance(path, StorePath):
                self.items.append(Item(kind="checkpoints", path=path, root=self.root, bytes=row.bytes, run=run))
            else:
                self._add("checkpoints", path, run)
        if not isinstance(place, StorePath):
            for part in sorted(place.glob(f"step-*{PART}")):
                if is_old(part):
                    self._add("temporary", part, run)

    def _look_at_superseded(self, sweep: SweepFolder, named: frozenset[str]) -> None:
        if sweep.superseded.is_symlink():
            return
        with contextlib.suppress(OSError):
            for folder in sorted(sweep.superseded.iterdir()):
                run = RunFolder(folder)
                if folder.is_symlink() or not folder.is_dir() or run.is_claimed():
                    continue
                for name in _BULKY:
                    path = folder / name
                    is_needed = any(named_path.startswith(str(path.resolve())) for named_path in named)
                    if not is_needed and path.is_dir() and any(path.iterdir()):
                        self._add("superseded", path, run)

    def _look_at_code(self, sweep: SweepFolder, busy: set[str]) -> None:
        """Snapshots that no unfinished run uses, and without which no run's code would be lost."""
        runs = {run.path.name: run for run in sweep.runs()}
        used, only_copies = set(), set()
        for submission in sweep.submissions():
            if any(run in busy or (run in runs and not _has_ended(runs[run])) for run in submission.runs):
                used.add(Path(submission.code).name)
        for run in runs.values():
            code = (run.env() or {}).get("code")
            if isinstance(code, dict) and not _is_restorable(code):
                # As text: a damaged record may have a list there.
                only_copies.add(str(code.get("fingerprint")))
        if sweep.code.is_symlink():
            return
        with contextlib.suppress(OSError):
            for folder in sorted(sweep.code.iterdir()):
                record = read_optional(folder / RECORD) or {}
                if folder.name.startswith(".") or folder.name in used or str(record.get("fingerprint")) in only_copies:
                    continue
                if record and is_old(folder):
                    self._add("code", folder)

    def _add_temporary(self, folder: Path, run: RunFolder | None = None) -> None:
        if folder.is_symlink():
            return
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                if TEMPORARY.fullmatch(path.name) and is_old(path):
                    self._add("temporary", path, run)


def _has_ended(run: RunFolder) -> bool:
    """Whether a run has ended, and does not go back into the queue by itself."""
    try:
        result = run.result()
    except ConfigError:
        return False
    return result is not None and not result.kind.automatic


def _is_restorable(code: dict[str, object]) -> bool:
    """Whether git has the code of a run, with the difference that the run has kept."""
    git = code.get("git")
    return isinstance(git, dict) and bool(git.get("sha")) and git.get("patch_complete") is True


def starting_points(root: Path) -> frozenset[str]:
    """Checkpoints, or folders of them, from which runs start, as real paths and addresses."""
    return frozenset(_starting_points(root))


def _starting_points(root: Path) -> Iterator[str]:
    for path in root.glob("*/*/config.yaml"):
        # A file of a stranger may be a trap, and its text any text: a path with a zero byte, or a ring of links.
        with contextlib.suppress(ConfigError, OSError, RuntimeError, ValueError):
            if _STARTS.search(read_bytes(path, most_bytes=_CONFIG_BYTES)):
                run = RunFolder(path.parent)
                for text in (run.config().get("init_from"), run.section("checkpoint").get("load_from")):
                    if isinstance(text, str) and text:
                        yield text if is_address(text) else str(user_path(text).resolve())

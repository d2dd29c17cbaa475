"""The folder of a sweep: its runs, its submissions, and their code; docs/run-folder.md has the schema of every file."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titanlab
from titanlab.errors import ConfigError
from titanlab.launch import Submission, submission
from titanlab.records import (
    RECORD,
    NoSuchRun,
    RunFolder,
    code_fingerprint,
    find_run,
    git_state,
    read_optional,
    read_points,
    redact,
)
from titanlab.system import finite, user_path, write_json, write_text

SCHEMA = 1
SINGLE = "single"
"""The sweep of runs that were started one by one."""
_HASH = re.compile(r"[0-9a-f]{4,8}")


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk; the constructor reads nothing."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def jobs(self) -> Path:
        """The folder of batch files and of the output of tasks."""
        return submission.jobs_folder(self.path)

    @property
    def code(self) -> Path:
        """The folder of the snapshots of the code."""
        return self.path / "code"

    @property
    def superseded(self) -> Path:
        """The folder for old folders of runs that started again from the beginning."""
        return self.path / "superseded"

    def manifest(self) -> dict[str, Any]:
        """The content of sweep.json; empty if runs were started one by one, or if the file is damaged."""
        return read_optional(self.path / "sweep.json") or {}

    def notes(self) -> str:
        """The notes of the latest submission on one line; empty if it has none."""
        notes = self.manifest().get("notes")
        return " ".join(notes.split()) if isinstance(notes, str) else ""

    def title(self) -> str:
        """The name, and the beginning of the notes."""
        return self.name + (f" · {textwrap.shorten(notes, 100, placeholder=' …')}" if (notes := self.notes()) else "")

    def points(self) -> list[dict[str, Any]]:
        """The rows of points.jsonl: every point of the space, also dropped ones."""
        return read_points(self.path)

    def submissions(self) -> list[Submission]:
        return submission.submissions(self.path)

    def runs(self) -> list[RunFolder]:
        """All runs, by name."""
        # A leading dot marks a folder that is not complete.
        folders = (path.parent for path in self.path.glob("*/config.yaml"))
        return [RunFolder(path) for path in sorted(folders) if not path.name.startswith(".")]

    def run(self, name: str) -> RunFolder:
        """The run in the folder of this name, which need not exist."""
        return RunFolder(self.path / name)

    def find(self, texts: Sequence[str]) -> list[RunFolder]:
        """The runs that a user names by folder, label, or first digits of the hash; all runs if no text is given.

        Raises:
            NoSuchRun: a text matches no run.
        """
        known = self.runs()
        chosen: dict[Path, RunFolder] = {} if texts else {run.path: run for run in known}
        for text in texts:
            name = Path(text).name
            matches = [run for run in known if run.path.name == name] or [run for run in known if run.name == name]
            if not matches and _HASH.fullmatch(name):
                matches = [run for run in known if run.hash8.startswith(name)]
                if len(matches) > 1:
                    rule = f"is the beginning of {len(matches)} runs' hashes"
                    raise ConfigError("run", text, rule, f"try {matches[0].path.name}")
            if not matches:
                near = difflib.get_close_matches(name, [run.path.name for run in known], n=1, cutoff=0.0)
                cure = f"try {near[0]}" if near else "train one first"
                raise NoSuchRun("run", text, f"fits no run of sweep {self.name}", cure)
            chosen.update({run.path: run for run in matches})
        return list(chosen.values())

    def write_manifest(self, manifest: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
        """Replace sweep.json and points.jsonl."""
        text = "".join(json.dumps(finite(point), ensure_ascii=False) + "\n" for point in points)
        write_text(self.path / "points.jsonl", text)
        write_json(self.path / "sweep.json", {"schema": SCHEMA, **manifest})

    def claim(self) -> AbstractContextManager[None]:
        """Claim the sweep to submit, retry or cancel; waits while another process has the claim.

        Raises:
            ConfigError: the other process keeps the claim for too long.
        """
        return submission.claim_sweep(self.path)


def jobs_of(sweep: SweepFolder, submitted: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """The latest submission of every run, and the run's index there.

    Omits a submission that is older than the run's folder: it belongs to an earlier folder, which was moved aside.
    """
    latest = {run: (submission, index) for submission in submitted for index, run in enumerate(submission.runs)}
    jobs = {}
    for run, job in latest.items():
        created = None
        with contextlib.suppress(ConfigError):  # The run's files cannot be read.
            created = sweep.run(run).created()
        if job[0].created >= (created or 0.0):
            jobs[run] = job
    return jobs


def readable(runs: Sequence[RunFolder], report: Callable[[str], None], *, named: bool) -> list[RunFolder]:
    """The runs whose files can be read, so that one damaged run does not prevent an action on the others.

    Args:
        named: whether the user has named the runs; then a damaged run is an error.

    Raises:
        ConfigError: a named run cannot be read.
    """
    intact = []
    for run in runs:
        try:
            run.check_files()
        except ConfigError as error:
            if named:
                raise
            report(f"{run.path.name} is left alone: {error}")
        else:
            intact.append(run)
    return intact


def open_sweep(text: str, runs: Path | str = "runs") -> SweepFolder:
    """The sweep that a user names, by path or by name.

    Raises:
        ConfigError: it does not exist.
    """
    root = user_path(runs)
    for path in (root / text, user_path(text)):
        folder = SweepFolder(path.absolute())
        if text and path.is_dir() and (folder.manifest() or folder.runs()):
            return folder
    known = [path.name for path in sorted(root.glob("*")) if SweepFolder(path).manifest() or SweepFolder(path).runs()]
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4) or known[-3:]
    cure = f"try {' or '.join(near)}" if near else "submit one first (titanlab sweep), or say where runs are (--runs)"
    raise ConfigError("sweep", text, f"is not a sweep under {runs}", cure)


def find_run_or_sweep(text: str, runs: Path | str, key: str = "run") -> RunFolder | SweepFolder:
    """The run that a user names or, if no run is meant, the sweep; with an absolute path.

    Args:
        key: the key of the error if there is neither a run nor a sweep.

    Raises:
        ConfigError: no run and no sweep matches, several runs match, or the files of the run are damaged.
    """
    try:
        return RunFolder(find_run(text, runs).path.absolute())
    except ConfigError as no_run:
        try:
            return open_sweep(text, runs)
        except ConfigError:
            if not isinstance(no_run, NoSuchRun):
                raise no_run from None
            raise ConfigError(key, text, f"is neither a run nor a sweep under {runs}", no_run.cure) from None


CODE_SCHEMA = 1
_FOLDERS = ("conf", "launch", "sweeps")
_TEXTS = (".yaml", ".yml", ".csv")
_COMPILED = "__pycache__"
# Not code: editors' temporary files, and files that Python does not import.
_NO_CODE = ("*.pyc", ".*", "*~")


def take_snapshot(code: Path, *, package: Path | None = None) -> Path:
    """Copy the package and its YAML files into a subfolder of `code` named by their hash. Returns the subfolder.

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
        # Hash the copy: somebody may edit the original meanwhile.
        digest = hashlib.sha256()
        for path in sorted(path for path in part.rglob("*") if path.is_file() and path.parent.name != _COMPILED):
            digest.update(path.relative_to(part).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        final = code / digest.hexdigest()[:12]
        if not (final / RECORD).is_file():
            git = git_state(package)
            record = {
                "schema": CODE_SCHEMA,
                "created": time.time(),
                "version": titanlab.__version__,
                "fingerprint": code_fingerprint(part / "titanlab"),
                "git": git and {**dataclasses.asdict(git), "patch": redact(git.patch)},
            }
            write_json(part / RECORD, record)
            try:
                part.rename(final)
            except OSError:
                # Another process has created the same snapshot first.
                if not (final / RECORD).is_file():
                    raise
        return final
    finally:
        shutil.rmtree(part, ignore_errors=True)


@functools.cache
def present_code() -> str:
    """The fingerprint of the code that runs now, as in the env.json of runs."""
    return code_fingerprint(Path(titanlab.__file__).parent)


def _not_code(folder: str, names: list[str]) -> set[str]:
    # Copy compiled modules too; they stay valid because the copy keeps the sources' times. Otherwise every rank of a
    # job would compile all modules at the same time.
    if Path(folder).name == _COMPILED:
        return {name for name in names if not name.endswith(".pyc")}
    return set(shutil.ignore_patterns(*_NO_CODE)(folder, names))


def _not_texts(folder: str, names: list[str]) -> set[str]:
    # launch/ may contain sockets and logs of a development Slurm.
    kept = {name for name in names if name.endswith(_TEXTS) or Path(folder, name).is_dir()}
    return {name for name in names if name not in kept or name.startswith(".") or name == "dev-slurm"}

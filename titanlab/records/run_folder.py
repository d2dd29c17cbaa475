"""The folder of a run, `runs/<sweep>/<name>-<hash8>/`. docs/run-folder.md has the schema of every file.

The process that submits the run, or that launches its ranks, makes the folder. One rank writes metrics, status and
result. Every rank may write a record of its own failure.

metrics.jsonl has one JSON object a line; one rank appends rows, and others may read at the same time. Every row has
`kind`, `step`, `attempt` and `time`. The first row of an attempt has the kind `attempt`, and its step is the step that
the attempt resumed from. Rows of earlier attempts for later steps stay in the file but are ignored.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from titanlab.errors import ConfigError
from titanlab.records import claim
from titanlab.records.files import RESTORE, config_text, read_config, read_optional, read_typed, write_typed
from titanlab.records.identity import Identity
from titanlab.records.logs import write_marks
from titanlab.records.outcome import Outcome
from titanlab.system import (
    FolderGone,
    finite,
    open_to_write,
    parse_json,
    read_bytes,
    user_path,
    write_json,
    write_text,
)

SCHEMA = 1
FOLDER_NAME = re.compile(r"(?P<name>.+)-(?P<hash8>[0-9a-f]{8})")
SAVED = "saved.json"
CHOSEN = "chosen.json"
RESTART = "restart.json"
STOPPED = "stopped"
# Sections of env.json that readers expect to be mappings.
_ENV_SECTIONS = ("code", "packages", "host", "environment")
_GIVE_WRITABLE = "give a folder of yours: try runs=~/runs"
_SUBFOLDERS = ("attempts", "checkpoints", "logs", "traces")
_LONGEST = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST - 1}}}")

State = Literal["prepared", "starting", "running", "saving", "ended"]
STATES = get_args(State)


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json, which the process `pid` on `host` has written."""

    state: State
    step: int = 0
    steps: int | None = None
    attempt: int = 0  # from 1; 0 before the first attempt
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    updated: float = field(default_factory=time.time)  # seconds since the epoch
    seconds_left: float | None = None  # an estimate
    outcome: str | None = None  # the kind of outcome; None before the run has ended
    # The latest row of metrics.jsonl, so that a table of many runs need not read that file.
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFolder:
    """One run on disk; each method reads or writes its file when it is called.

    A damaged file, or a file of another version, raises ConfigError; a folder that was moved or removed, FolderGone.
    """

    path: Path

    @property
    def name(self) -> str:
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["name"] if match else self.path.name

    @property
    def hash8(self) -> str:
        """First digits of the identity; empty if the folder was renamed."""
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["hash8"] if match else ""

    @property
    def sweep(self) -> str:
        return self.path.parent.name

    @property
    def logs(self) -> Path:
        """Folder of what the processes print."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer's file, if the data has a tokenizer."""
        return self.path / "tokenizer"

    @property
    def traces(self) -> Path:
        """Folder of the output of profilers."""
        return self.path / "traces"

    def attempt_folder(self, attempt: int) -> Path:
        """Folder of one attempt's config, environment, result and failures of ranks."""
        return self.path / "attempts" / str(attempt)

    def _file(self, name: str, attempt: int | None) -> Path:
        return (self.path if attempt is None else self.attempt_folder(attempt)) / name

    def config(self, attempt: int | None = None) -> dict[str, Any]:
        """The resolved recipe with which the run was made, or the recipe of one attempt."""
        return read_config(self._file("config.yaml", attempt))

    def section(self, group: str) -> dict[str, Any]:
        """The values of one group of the recipe with which the run was made; empty if there are none."""
        values = self.config().get(group)
        if not isinstance(values, dict | None):
            raise ConfigError(group, values, f"is not a mapping in {self.path / 'config.yaml'}", RESTORE)
        return values or {}

    def identity(self) -> Identity | None:
        """The content of identity.json; None if the folder has none."""
        return read_typed(self.path / "identity.json", Identity, schema=SCHEMA)

    def created(self) -> float | None:
        """When the folder was made, in seconds since the epoch; None: it was not recorded."""
        return None if (identity := self.identity()) is None else identity.created

    def parent(self) -> tuple[str, int] | None:
        """The checkpoint from which this run started: its run, as `sweep/folder`, and its step; None: there is none."""
        identity = self.identity()
        if identity is None or identity.parent_run is None or identity.parent_step is None:
            return None
        return identity.parent_run, identity.parent_step

    def env(self, attempt: int | None = None) -> dict[str, Any] | None:
        """Code, versions and machine of the latest attempt, or of the given attempt, without damaged sections."""
        record = read_optional(self._file("env.json", attempt))
        if record is None:
            return None
        record = {name: value for name, value in record.items() if name not in _ENV_SECTIONS or isinstance(value, dict)}
        code = record.get("code", {})
        if not isinstance(code.get("git"), dict):
            code.pop("git", None)
        return record

    def status(self) -> Status | None:
        """The run's status; None if there is no status.json."""
        cure = "remove that file: it is written anew when the run goes on"
        return read_typed(self.path / "status.json", Status, schema=SCHEMA, cure=cure)

    def known_status(self) -> Status | None:
        """The run's status; None if status.json is missing or damaged, for callers that will replace it."""
        try:
            return self.status()
        except ConfigError:
            return None

    def result(self, attempt: int | None = None) -> Outcome | None:
        """How the latest attempt, or the given attempt, ended; None if it has not ended."""
        return read_typed(self._file("result.json", attempt), Outcome, schema=SCHEMA)

    def check_files(self) -> None:
        """Check that config, identity, status and result can be read."""
        self.config()
        self.identity()
        self.status()
        self.result()

    def failures(self, attempt: int) -> list[Outcome]:
        """The failures that the ranks of an attempt have written, sorted by rank."""
        failures = []
        for path in (self.attempt_folder(attempt) / "failures").glob("rank-*.json"):
            # Skip a damaged record; the records of the other ranks have the cause.
            with contextlib.suppress(ConfigError):
                if (failure := read_typed(path, Outcome, schema=SCHEMA)) is not None:
                    failures.append(failure)
        return sorted(failures, key=lambda outcome: outcome.rank or 0)

    def stopped(self, attempt: int) -> str | None:
        """A sentence about the stopped ranks (SIGSTOP) of an attempt in progress; None: no known rank is stopped."""
        records = map(read_optional, sorted((self.attempt_folder(attempt) / STOPPED).glob("rank-*.json")))
        return "; ".join(str(record.get("words")) for record in records if record) or None

    def attempts(self) -> list[int]:
        """Numbers of all attempts, from 1."""
        try:
            names = [path.name for path in (self.path / "attempts").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if name.isdecimal() and name.isascii() and len(name) <= 6)

    def newest_attempt(self) -> int:
        """The number of the newest attempt; 0 if there is none."""
        return max(self.attempts(), default=0)

    def chosen_attempt(self, number: int | None) -> int:
        """The number of the attempt that the user names, or of the newest; 0: none is named, and none exists."""
        known = self.attempts()
        if number is None:
            return self.newest_attempt()
        if number not in known:
            shown = ", ".join(map(str, known)) or "none"
            cure = f"try --attempt {known[-1]}" if known else "leave it out"
            raise ConfigError("--attempt", number, f"the run has no such attempt; known: {shown}", cure)
        return number

    def restarts(self) -> int:
        """Number of attempts that began automatically, because a rank of the attempt before had died."""
        return sum((self.attempt_folder(attempt) / RESTART).exists() for attempt in self.attempts())

    def job(self, attempt: int | None = None) -> dict[str, Any] | None:
        """The job that ran the latest attempt, or the given attempt; None if no job did."""
        return read_optional(self.attempt_folder(self.newest_attempt() if attempt is None else attempt) / "job.json")

    def saved_step(self) -> int:
        """The step that was saved last, even if its checkpoint was removed later; 0: no step was saved."""
        for attempt in reversed(self.attempts()):
            step = (read_optional(self.attempt_folder(attempt) / SAVED) or {}).get("step")
            if isinstance(step, int):
                return step
        return 0

    def lost_steps(self, step: int | None = None) -> str:
        """The steps that are lost if the run ends without saving, as a clause; empty if no step is lost.

        Args:
            step: the last finished step; None: the step in status.json, which may be some seconds old.
        """
        status, saved = self.known_status(), self.saved_step()
        lost = (step or (status.step if status is not None else 0)) - saved
        since = f" since the checkpoint of step {saved}" if saved else ""
        return f"{lost} step{'s' * (lost > 1)}{since} {'are' if lost > 1 else 'is'} lost" if lost > 0 else ""

    def has_chosen(self, attempt: int) -> bool:
        """Whether the user has chosen the checkpoint from which an attempt resumes."""
        return (self.attempt_folder(attempt) / CHOSEN).exists()

    def asked_to_cancel(self) -> str | None:
        """The user who asked to cancel the run since its last submission or start; None if nobody did."""
        request = read_optional(self.path / "cancel.json")
        return None if request is None else str(request.get("by"))

    def is_claimed(self) -> bool:
        """Whether a live process has locked the run."""
        return claim.is_claimed(self.path)

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The valid rows of metrics.jsonl, as `read_metrics` returns them."""
        return read_metrics(self.path / "metrics.jsonl", kind)

    def note_chosen(self, attempt: int, step: int) -> None:
        """Record that the user has chosen the checkpoint of a step for an attempt."""
        write_json(self.attempt_folder(attempt) / CHOSEN, {"step": step})

    def begin_attempt(
        self, config: Mapping[str, Any], env: Mapping[str, Any] | None, *, patch: str | None = None
    ) -> int:
        """Make the folder of the next attempt; processes that call this at the same time get different numbers.

        Args:
            env: content of env.json; None for an attempt whose processes never started.
            patch: difference of the code to its commit, written as `code.patch`.

        Raises:
            ConfigError: the path of the folder of attempts or of logs is not a folder.
        """
        for parent in (self.path / "attempts", self.logs):
            if os.path.lexists(parent) and not parent.is_dir():
                raise ConfigError("run", parent, "is not a folder", "remove it")
        for attempt in range(self.newest_attempt() + 1, 1_000_000):
            folder = self.attempt_folder(attempt)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            try:
                # A user may have removed the folder of logs.
                self.logs.mkdir(exist_ok=True)
                write_text(folder / "config.yaml", config_text(config))
                if env is not None:
                    write_json(folder / "env.json", env)
                    write_json(self.path / "env.json", env)
                if patch is not None:
                    write_text(folder / "code.patch", patch)
                write_marks(self, attempt)
                self.write_status(Status(state="starting", attempt=attempt))
            except OSError:
                # The disk is full. An attempt without a config must not become the latest attempt.
                shutil.rmtree(folder, ignore_errors=True)
                raise
            # Remove the run's copy of an earlier attempt's result; that attempt's folder keeps the result.
            (self.path / "result.json").unlink(missing_ok=True)
            return attempt
        raise AssertionError("a million attempts")

    def open_metrics(self, attempt: int, *, resumed_step: int = 0) -> MetricsWriter:
        """Open metrics.jsonl for the rows of an attempt."""
        return MetricsWriter(self.path / "metrics.jsonl", attempt=attempt, resumed_step=resumed_step)

    def write_status(self, status: Status) -> None:
        """Replace status.json. FolderGone: the run's folder was moved or removed."""
        try:
            write_typed(self.path / "status.json", status, schema=SCHEMA)
        except FileNotFoundError as error:
            if self.path.is_dir():
                raise
            raise FolderGone(str(self.path)) from error

    def write_result(self, outcome: Outcome) -> None:
        """Write the end of an attempt into the attempt's result, the run's result, and the status.

        Attempt 0 means that the run ended while it waited, outside any attempt; then only the run gets a result.
        """
        if outcome.attempt:
            self._write_end(self.attempt_folder(outcome.attempt) / "result.json", outcome)
        self._write_end(self.path / "result.json", outcome)
        status = self.known_status() or Status(state="ended")
        self.write_status(
            replace(
                status,
                state="ended",
                step=outcome.step,
                steps=outcome.steps or status.steps,
                attempt=outcome.attempt or status.attempt,
                updated=time.time(),
                seconds_left=None,
                outcome=outcome.kind.value,
            )
        )

    def note_saved(self, attempt: int, step: int) -> None:
        """Record which step an attempt saved last, so that a later attempt notices if that checkpoint was removed.

        Raises:
            FolderGone: the run's folder was moved or removed.
        """
        if not self.path.is_dir():
            raise FolderGone(str(self.path))
        folder = self.attempt_folder(attempt)
        # The folder is missing if a program calls `train` without `begin_attempt`.
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SAVED, {"schema": SCHEMA, "step": step, "time": time.time()})

    def write_failure(self, outcome: Outcome) -> None:
        """Write the failure of one rank; `outcome.first_cause` selects the cause among those of all ranks."""
        folder = self.attempt_folder(outcome.attempt) / "failures"
        self._write_end(folder / f"rank-{outcome.rank or 0}.json", outcome)

    def _write_end(self, path: Path, outcome: Outcome) -> None:
        """Write an outcome into the folder of the run.

        Raises:
            FolderGone: the folder was moved or removed. A new folder would hold a result without a run.
            OSError: the outcome cannot be written. The next process that looks at the run then writes an outcome, as it
            does for a killed run.
        """
        if not self.path.is_dir():
            raise FolderGone(str(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_typed(path, outcome, schema=SCHEMA, durable=True)

    def keep_stopped(self, attempt: int, rank: int, words: str | None) -> None:
        """Write a sentence about a rank that is stopped (SIGSTOP); `words` None: the rank goes on, remove it."""
        path = self.attempt_folder(attempt) / STOPPED / f"rank-{rank}.json"
        if words is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"schema": SCHEMA, "words": words})

    def ask_to_cancel(self) -> None:
        """Ask the processes of the run, also those of an attempt that starts now, to save and end as cancelled."""
        write_json(self.path / "cancel.json", {"by": f"titanlab cancel on {socket.gethostname()}", "time": time.time()})

    def withdraw_cancel(self) -> None:
        """Remove an earlier request to cancel, before the run is submitted or started again."""
        (self.path / "cancel.json").unlink(missing_ok=True)

    def claim(self, *, patience_seconds: float = claim.PATIENCE_SECONDS) -> AbstractContextManager[None]:
        """Lock the run for this process, as `claim.claimed` does."""
        return claim.claimed(self.path, "run", patience_seconds=patience_seconds)


def check_name(key: str, value: str) -> None:
    """Check that a name can be the name of a folder."""
    if not _NAME.fullmatch(value):
        rule = f"becomes a folder's name: up to {_LONGEST} letters, digits, '.', '_' and '-'"
        raise ConfigError(key, value, rule, f"try {safe_name(value)}")


def safe_name(text: str, *, longest: int = _LONGEST, otherwise: str = "run") -> str:
    """A valid folder name that resembles a text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:longest] or otherwise


def check_runs(runs: Path | str) -> None:
    """Check that the folder of all runs can be written, without making it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = user_path(runs)
    if not str(runs).strip():
        raise ConfigError("runs", runs, "names no folder", "try runs")
    if (home := str(folder).partition("/")[0]).startswith("~"):
        # Otherwise a folder with the name `~NAME` would be made here, which no user wants.
        raise ConfigError("runs", runs, f"{home} is not a user of this host", _GIVE_WRITABLE)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    rule = None if existing.is_dir() else f"cannot be written ({existing} is not a folder)"
    if rule is None and not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be written (no permission in {existing})"
    if rule is not None:
        raise ConfigError("runs", runs, rule, _GIVE_WRITABLE)


def create_run(
    runs: Path | str,
    *,
    sweep: str = "single",
    name: str,
    identity: Identity,
    config: Mapping[str, Any],
    parent: Mapping[str, Any] | None = None,
) -> RunFolder:
    """The folder of a run, made if it is missing. A rename publishes it, so that all processes get the same folder.

    Args:
        config: the resolved recipe as plain values; written to config.yaml.
        parent: `parent_run` and `parent_step`, if the run starts from another run's checkpoint.

    Raises:
        ConfigError: a label cannot be a folder's name, the folder cannot be written, or it belongs to another run.
    """
    check_name("sweep", sweep)
    check_name("name", name)
    final = user_path(runs) / sweep / f"{name}-{identity.hash8}"
    part = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if not (final / "config.yaml").exists():
            for folder in _SUBFOLDERS:
                (part / folder).mkdir(parents=True)
            content = {"sha256": identity.sha256, "content": identity.content, "created": time.time()}
            content["tracker_id"] = tracker_id(identity, final, sweep=sweep)
            write_json(part / "identity.json", {"schema": SCHEMA, **content, **(parent or {})})
            write_text(part / "config.yaml", config_text(config))
            RunFolder(part).write_status(Status(state="prepared"))
            # This fails if another process was faster: a rename does not replace a folder that has files.
            part.rename(final)
    except OSError as error:
        if not (final / "config.yaml").exists():
            rule = f"cannot be written ({error.strerror or type(error).__name__})"
            raise ConfigError("runs", runs, rule, _GIVE_WRITABLE) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    run = open_run(final)
    kept = run.identity()
    if kept is not None and kept.sha256 != identity.sha256:
        raise ConfigError("name", name, f"{final} belongs to another run", f"try name={name}-2")
    return run


def tracker_id(identity: Identity, folder: Path, *, sweep: str) -> str:
    """The run's id in trackers: always the same for a run in this folder, and different for a run in any other folder.

    Two people may log one recipe to one project, and a sweep may train a recipe again on purpose: so the sweep, the
    folder and the user are part of the id.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        # In a container the user may have no name.
        user = str(os.getuid())
    text = "\n".join([identity.sha256, sweep, str(folder.absolute()), user])
    return f"{identity.hash8}-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:8]}"


def open_run(path: Path | str) -> RunFolder:
    path = user_path(path)
    if not (path / "config.yaml").is_file():
        rule = "has no config.yaml" if path.is_dir() else "is not a folder"
        raise ConfigError("run", path, rule, "name the folder of a run, such as runs/single/quickstart-1a2b3c4d")
    return RunFolder(path)


ATTEMPT = "attempt"
TRAIN = "train"
VALIDATION = "validation"
EXPERTS = "experts"
"""Kind of rows with counts of tokens by block and expert; these are not metrics, so trackers do not get them."""
_EVERY_ROW = ("kind", "step", "attempt", "time")
# The largest file that is read, 16 GiB; a million rows have 0.6 GB.
_MOST_BYTES = 1 << 34


class MetricsWriter:
    """Appends rows to a metrics.jsonl, each in one write: at most the last row can be incomplete after a crash.

    Numbers that are not finite become null.
    """

    def __init__(
        self, path: Path, *, attempt: int, resumed_step: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._rest = b""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # End the incomplete line of an attempt that crashed, so that the next row starts a new line.
            os.write(self._descriptor, b"\n")
        self.write(ATTEMPT, resumed_step, {})

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row. OSError: the disk is full or unreachable; `flush` writes the rest of the row."""
        row = {"kind": kind, "step": step, "attempt": self._attempt, "time": round(self._clock(), 3), **metrics}
        line = json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        self._rest += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write the rest of a row that did not fit on a full disk."""
        while self._rest:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row, without the keys that every row has."""
    return {key: value for key, value in row.items() if key not in _EVERY_ROW}


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The valid rows, sorted by step: for each kind and step, the row of the latest attempt.

    Incomplete lines are skipped; a missing file has no rows.

    Args:
        kind: only rows of this kind; None: all kinds but `attempt`. `attempt`: the first row of every attempt.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = read_bytes(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("run", path, rule, "restore that file, or remove it") from error
    rows = []
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            # Compare `type`, because `isinstance` would take true for an int.
            kinds = [type(row.get(key)) for key in _EVERY_ROW[:3]] if isinstance(row, dict) else None
            if kinds == [str, int, int]:
                rows.append(row)
    attempts = [row for row in rows if row["kind"] == ATTEMPT]
    if kind == ATTEMPT:
        return attempts
    resumed = {row["attempt"]: row["step"] for row in attempts}
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        is_selected = row["kind"] != ATTEMPT if kind is None else row["kind"] == kind
        if not is_selected or any(row["attempt"] < later and row["step"] > step for later, step in resumed.items()):
            continue
        key = (row["kind"], row["step"])
        if key not in latest or latest[key]["attempt"] <= row["attempt"]:
            latest[key] = row
    return sorted(latest.values(), key=lambda row: row["step"])

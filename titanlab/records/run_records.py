"""Reads the folder of a run, `runs/<sweep>/<name>-<hash8>/`. docs/run-folder.md has the schema of every file."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records import claim
from titanlab.records.config_file import read_config
from titanlab.records.identity import Identity
from titanlab.records.json_file import RESTORE, check_object, read_object, read_optional
from titanlab.records.metrics_file import read_metrics
from titanlab.records.outcome import Outcome, read_end
from titanlab.system.files import write_json

STATUS_SCHEMA = 1
STATES = ("prepared", "starting", "running", "saving", "ended")
# Types of the keys in JSON; a pair with None may be null.
STATUS_KINDS: Mapping[str, Any] = {
    "state": str,
    "step": int,
    "steps": (int, None),
    "attempt": int,
    "pid": int,
    "host": str,
    "updated": float,
    "seconds_left": (float, None),
    "outcome": (str, None),
    "metrics": dict,
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json.

    Attributes:
        state: one of STATES.
        step, steps: optimizer steps done, and in all.
        attempt: number of the attempt, from 1; 0 before the first.
        pid, host: the process that wrote the file.
        updated: when it was written, in seconds since the epoch.
        seconds_left: an estimate; None if there is none.
        outcome: the kind of outcome; None before the run has ended.
        metrics: the latest row of metrics.jsonl, so that a table of many runs need not read that file.
    """

    state: str
    step: int = 0
    steps: int | None = None
    attempt: int = 0
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    updated: float = field(default_factory=time.time)
    seconds_left: float | None = None
    outcome: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


def read_status(path: Path) -> Status | None:
    """The status in a file; None if there is no file.

    Raises:
        ConfigError: the file is damaged, or another version of titanlab wrote it.
    """
    cure = "remove that file: it is written anew when the run goes on"
    value = read_object(path, cure=cure)
    if value is None:
        return None
    check_object(path, value, schema=STATUS_SCHEMA, kinds=STATUS_KINDS, cure=cure)
    if value.get("state") not in STATES:
        raise ConfigError("state", value.get("state"), f"is none of {', '.join(STATES)} in {path}", cure)
    known = {field.name for field in fields(Status)}
    return Status(**{key: inner for key, inner in value.items() if key in known})


def write_status(path: Path, status: Status) -> None:
    """Replace the status in a file."""
    if status.state not in STATES:
        raise ValueError(f"{status.state!r} is none of {STATES}")
    write_json(path, {"schema": STATUS_SCHEMA, **asdict(status)})


SCHEMA = 1
FOLDER_NAME = re.compile(r"(?P<name>.+)-(?P<hash8>[0-9a-f]{8})")
SAVED = "saved.json"
CHOSEN = "chosen.json"
RESTART = "restart.json"
STOPPED = "stopped"
# What readers of env.json expect to be mappings.
_ENV_SECTIONS = ("code", "packages", "host", "environment")


@dataclass(frozen=True)
class RunRecords:
    """The records of one run; each method reads its file when it is called."""

    path: Path

    @property
    def name(self) -> str:
        """The run's label, without the hash."""
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["name"] if match else self.path.name

    @property
    def hash8(self) -> str:
        """First digits of the identity; empty if the folder was renamed."""
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["hash8"] if match else ""

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run belongs to."""
        return self.path.parent.name

    @property
    def logs(self) -> Path:
        """Folder of the text that processes print."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Saved states, one folder each."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file, where the data has one."""
        return self.path / "tokenizer"

    @property
    def traces(self) -> Path:
        """Output of profilers."""
        return self.path / "traces"

    def attempt_folder(self, attempt: int) -> Path:
        """Folder of one attempt's config, environment, result and failures of ranks."""
        return self.path / "attempts" / str(attempt)

    def config(self, attempt: int | None = None) -> dict[str, Any]:
        """The resolved recipe with which the run was made, or the recipe of one attempt."""
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        return read_config(folder / "config.yaml")

    def section(self, group: str) -> dict[str, Any]:
        """The values of one group of the recipe with which the run was made; empty if it has none.

        Raises:
            ConfigError: config.yaml is damaged.
        """
        values = self.config().get(group)
        if not isinstance(values, dict | None):
            raise ConfigError(group, values, f"is no mapping in {self.path / 'config.yaml'}", RESTORE)
        return values or {}

    def identity(self) -> Identity | None:
        """The full hash and the hashed values; None if the folder has no identity.json.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        value = self._identity()
        return None if value is None else Identity(sha256=value["sha256"], content=value["content"])

    def created(self) -> float | None:
        """When the folder was made, in seconds since the epoch; None if it was not recorded."""
        return (self._identity() or {}).get("created")

    def tracker_id(self) -> str | None:
        """The run's id in trackers; None for runs of earlier versions, whose id is in their checkpoints."""
        value = (self._identity() or {}).get("tracker_id")
        return value if isinstance(value, str) else None

    def parent(self) -> tuple[str, int] | None:
        """The run, as `sweep/folder`, and the step of the checkpoint from which this run started; None: from none."""
        value = self._identity() or {}
        name, step = value.get("parent_run"), value.get("parent_step")
        return (name, step) if isinstance(name, str) and isinstance(step, int) else None

    def _identity(self) -> dict[str, Any] | None:
        path = self.path / "identity.json"
        value = read_object(path)
        if value is not None:
            check_object(path, value, schema=SCHEMA, kinds={"sha256": str, "content": dict, "created": (float, None)})
            for key in ("sha256", "content"):
                if key not in value:
                    raise ConfigError(key, None, f"is missing in {path}", RESTORE)
        return value

    def env(self, attempt: int | None = None) -> dict[str, Any] | None:
        """Code, versions and machine of the latest attempt, or of the given attempt, without damaged sections."""
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        record = read_optional(folder / "env.json")
        if record is None:
            return None
        record = _with_mappings(record, _ENV_SECTIONS)
        if "code" in record:
            record["code"] = _with_mappings(record["code"], ("git",))
        return record

    def status(self) -> Status | None:
        """The run's status; None if there is no status.json.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        return read_status(self.path / "status.json")

    def known_status(self) -> Status | None:
        """The run's status; None if status.json is missing or damaged, for callers that will replace it."""
        try:
            return self.status()
        except ConfigError:
            return None

    def result(self, attempt: int | None = None) -> Outcome | None:
        """How the latest attempt, or the given attempt, ended; None if it has not ended.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        return read_end(folder / "result.json")

    def check_files(self) -> None:
        """Check that config, identity, status and result can be read.

        Raises:
            ConfigError: a file is damaged, or of another version.
        """
        self.config()
        self._identity()
        self.status()
        self.result()

    def failures(self, attempt: int) -> list[Outcome]:
        """The failures that the ranks of an attempt have written, sorted by rank."""
        failures = []
        for path in (self.attempt_folder(attempt) / "failures").glob("rank-*.json"):
            # A damaged note says nothing; the others hold the cause.
            with contextlib.suppress(ConfigError):
                failures.append(read_end(path))
        return sorted((failure for failure in failures if failure), key=lambda outcome: outcome.rank or 0)

    def stopped(self, attempt: int) -> str | None:
        """Which ranks of an attempt that has not ended are stopped (SIGSTOP); None: none is known to be."""
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
        """The attempt of the number that a user gives, or the newest; 0: none is given, and there is none.

        Raises:
            ConfigError: there is no attempt of this number.
        """
        known = self.attempts()
        if number is None:
            return self.newest_attempt()
        if number not in known:
            shown = ", ".join(map(str, known)) or "none"
            cure = f"try --attempt {known[-1]}" if known else "leave it out"
            raise ConfigError("--attempt", number, f"the run has no such attempt; known: {shown}", cure)
        return number

    def restarts(self) -> int:
        """How many attempts have begun by themselves, because a rank of the attempt before had died."""
        return sum((self.attempt_folder(attempt) / RESTART).exists() for attempt in self.attempts())

    def job(self, attempt: int | None = None) -> dict[str, Any] | None:
        """The job that ran the latest attempt, or the given attempt; None if no job did."""
        return read_optional(self.attempt_folder(self.newest_attempt() if attempt is None else attempt) / "job.json")

    def saved_step(self) -> int:
        """The step that was saved last, even if its checkpoint was removed since; 0: no step was saved."""
        for attempt in reversed(self.attempts()):
            step = (read_optional(self.attempt_folder(attempt) / SAVED) or {}).get("step")
            if isinstance(step, int):
                return step
        return 0

    def lost_steps(self, step: int | None = None) -> str:
        """The steps that are lost if the run ends without saving, as a clause; empty if none is.

        Args:
            step: the last one that is done; None: that of status.json, which may be some seconds old.
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
        """The valid rows of metrics.jsonl, as `metrics_file.read_metrics` returns them."""
        return read_metrics(self.path / "metrics.jsonl", kind)


def _with_mappings(record: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The record without those of its named entries that are no mappings."""
    return {name: value for name, value in record.items() if name not in names or isinstance(value, dict)}

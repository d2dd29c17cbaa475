"""The folder of a run, `runs/<sweep>/<name>-<hash8>/`: what is in it, and who may write what when.

The submitter makes it, or the process that launches the ranks. One rank writes metrics, status and
result; every rank may leave a note of its own failure. docs/run-folder.md has the schema of every file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records import claim
from titanlab.records.config_file import config_text, read_config
from titanlab.records.identity import Identity
from titanlab.records.json_file import RESTORE, check_object, read_object
from titanlab.records.metrics_file import MetricsWriter, read_metrics
from titanlab.records.outcome import KINDS as OUTCOME_KINDS
from titanlab.records.outcome import Outcome
from titanlab.records.outcome import from_mapping as outcome_from_mapping
from titanlab.records.run_status import KINDS as STATUS_KINDS
from titanlab.records.run_status import STATES, Status
from titanlab.system.atomic_file import write_bytes, write_json, write_text
from titanlab.system.disk import disk_fault

SCHEMA = 1
FOLDER_NAME = re.compile(r"(?P<name>.+)-(?P<hash8>[0-9a-f]{8})")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_OF_YOURS = "give a folder of yours: try runs=~/runs"
_SAVED = "saved.json"
# Room for the record of an end on a disk that has become full: results with a traceback, twice, and some ranks' notes.
_RESERVE = ".reserve"
_RESERVE_BYTES = 1 << 17
_SUBFOLDERS = ("attempts", "checkpoints", "logs", "traces")


@dataclass(frozen=True)
class RunFolder:
    """One run on disk; cheap to make, reads files when asked."""

    path: Path

    @property
    def name(self) -> str:
        """The run's label, without the hash."""
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["name"] if match else self.path.name

    @property
    def hash8(self) -> str:
        """First digits of the identity; empty for a folder that somebody has renamed."""
        match = FOLDER_NAME.fullmatch(self.path.name)
        return match["hash8"] if match else ""

    @property
    def sweep(self) -> str:
        """The collection that it belongs to."""
        return self.path.parent.name

    @property
    def logs(self) -> Path:
        """Text that processes print."""
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
        """What belongs to one attempt only: its config, environment, result and ranks' failures."""
        return self.path / "attempts" / str(attempt)

    # Reading

    def config(self, attempt: int | None = None) -> dict[str, Any]:
        """The resolved recipe as the run was born with it, or as one attempt ran it."""
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        return read_config(folder / "config.yaml")

    def identity(self) -> Identity | None:
        """The full hash and what was hashed; None where that was not noted.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        value = self._identity()
        return None if value is None else Identity(sha256=value["sha256"], content=value["content"])

    def created(self) -> float | None:
        """When the folder was made, in seconds since the epoch; None where that was not yet noted."""
        return (self._identity() or {}).get("created")

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
        """Code, versions and machine of the latest attempt, or of one."""
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        return _read_json(folder / "env.json")

    def status(self) -> Status | None:
        """Where the run stands; None where nobody has said it.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        path = self.path / "status.json"
        cure = "remove that file: it is written anew when the run goes on"
        value = read_object(path, cure=cure)
        if value is None:
            return None
        check_object(path, value, schema=SCHEMA, kinds=STATUS_KINDS, cure=cure)
        if value.get("state") not in STATES:
            raise ConfigError("state", value.get("state"), f"is none of {', '.join(STATES)} in {path}", cure)
        known = {each.name for each in fields(Status)}
        return Status(**{key: inner for key, inner in value.items() if key in known})

    def known_status(self) -> Status | None:
        """The status for those who go on without one, or replace it: None also for a file that is damaged."""
        try:
            return self.status()
        except ConfigError:
            return None

    def result(self, attempt: int | None = None) -> Outcome | None:
        """How the latest attempt ended, or a given one; None while it has not.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        folder = self.path if attempt is None else self.attempt_folder(attempt)
        path = folder / "result.json"
        value = read_object(path)
        if value is None:
            return None
        check_object(path, value, schema=SCHEMA, kinds=OUTCOME_KINDS)
        try:
            return outcome_from_mapping(value)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError("kind", value.get("kind"), f"is no end of a run in {path}", RESTORE) from error

    def check_files(self) -> None:
        """Hold what the run says of itself to be readable.

        Raises:
            ConfigError: a file is damaged, or of another version.
        """
        self.config()
        self._identity()
        self.status()
        self.result()

    def failures(self, attempt: int) -> list[Outcome]:
        """What the ranks of an attempt have noted about their own ends, by rank."""
        notes = [_read_json(path) for path in (self.attempt_folder(attempt) / "failures").glob("rank-*.json")]
        return sorted((outcome_from_mapping(note) for note in notes if note), key=lambda outcome: outcome.rank or 0)

    def attempts(self) -> list[int]:
        """Numbers of all attempts, from 1."""
        try:
            names = [path.name for path in (self.path / "attempts").iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def job(self, attempt: int | None = None) -> dict[str, Any] | None:
        """The job that made the latest attempt, or a given one; None for one that no job made."""
        return _read_json(
            self.attempt_folder(max(self.attempts(), default=0) if attempt is None else attempt) / "job.json"
        )

    def saved_step(self) -> int:
        """The step that was saved last, whether or not that checkpoint is still there; 0: none was."""
        for attempt in reversed(self.attempts()):
            step = (_read_json(self.attempt_folder(attempt) / _SAVED) or {}).get("step")
            if isinstance(step, int):
                return step
        return 0

    def asked_to_cancel(self) -> str | None:
        """Who has asked that the run be cancelled since it was last submitted, or started by hand."""
        wish = _read_json(self.path / "cancel.json")
        return None if wish is None else str(wish.get("by"))

    def is_claimed(self) -> bool:
        """Whether a live process works on it."""
        return claim.is_claimed(self.path)

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The rows that count, as `metrics_file.read_metrics` has them."""
        return read_metrics(self.path / "metrics.jsonl", kind)

    # Writing

    def begin_attempt(
        self, config: Mapping[str, Any], env: Mapping[str, Any] | None, *, patch: str | None = None
    ) -> int:
        """Open the next attempt: its own config and environment. Safe to race: each caller gets its own number.

        Args:
            env: None for one whose processes never were.
            patch: difference of the code to its commit, kept as `code.patch`.
        """
        for attempt in range(max(self.attempts(), default=0) + 1, 1_000_000):
            folder = self.attempt_folder(attempt)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            try:
                self._reserve_room()
                write_text(folder / "config.yaml", config_text(config))
                if env is not None:
                    write_json(folder / "env.json", env)
                    write_json(self.path / "env.json", env)
                if patch is not None:
                    write_text(folder / "code.patch", patch)
                self.write_status(Status(state="starting", attempt=attempt))
            except OSError:
                # A full disk: an attempt without a config would be taken for the newest.
                shutil.rmtree(folder, ignore_errors=True)
                raise
            # The last attempt's end is not this one's; it stays in that attempt's folder.
            (self.path / "result.json").unlink(missing_ok=True)
            return attempt
        raise AssertionError("a million attempts")

    def open_metrics(self, attempt: int, *, resumed_step: int = 0) -> MetricsWriter:
        """The writer of metrics.jsonl for an attempt that goes on from a step."""
        return MetricsWriter(self.path / "metrics.jsonl", attempt=attempt, resumed_step=resumed_step)

    def write_status(self, status: Status) -> None:
        """Replace status.json."""
        if status.state not in STATES:
            raise ValueError(f"{status.state!r} is none of {STATES}")
        write_json(self.path / "status.json", {"schema": SCHEMA, **asdict(status)})

    def write_result(self, outcome: Outcome) -> None:
        """Record how an attempt ended, for good: its own result, the run's, and the status.

        With attempt 0 it is the end of a run that waited: no attempt's, and only the run's.
        """
        if outcome.attempt:
            folder = self.attempt_folder(outcome.attempt)
            self._write_end(folder / "result.json", outcome)
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
        self.make_room()

    def note_saved(self, attempt: int, step: int) -> None:
        """Note that an attempt has saved a step: its checkpoints may be removed, and must not be missed in silence."""
        folder = self.attempt_folder(attempt)
        # Whoever calls `train` from a program of their own has begun no attempt.
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _SAVED, {"schema": SCHEMA, "step": step, "time": time.time()})

    def write_failure(self, outcome: Outcome) -> None:
        """Note a rank's own failure, for `outcome.first_cause` to choose among."""
        folder = self.attempt_folder(outcome.attempt) / "failures"
        self._write_end(folder / f"rank-{outcome.rank or 0}.json", outcome)

    def make_room(self) -> None:
        """Give back the room that was reserved for the record of an end."""
        with contextlib.suppress(OSError):
            (self.path / _RESERVE).unlink(missing_ok=True)

    def _reserve_room(self) -> None:
        """Take the room that the record of an end needs, while there is some.

        Raises:
            OSError: there is none.
        """
        if not (self.path / _RESERVE).exists():
            # Nothing that a file system could compress.
            write_bytes(self.path / _RESERVE, os.urandom(_RESERVE_BYTES), durable=True)

    def _write_end(self, path: Path, outcome: Outcome) -> None:
        """Write how something ended, on a full disk into the room that was reserved."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, outcome.to_mapping(), durable=True)
        except OSError as error:
            if disk_fault(error) is None:
                raise
            self.make_room()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, outcome.to_mapping(), durable=True)

    def ask_to_cancel(self) -> None:
        """Ask whoever works on the run to save and end it as cancelled, also in an attempt that begins just now."""
        write_json(self.path / "cancel.json", {"by": f"titanlab cancel on {socket.gethostname()}", "time": time.time()})

    def withdraw_cancel(self) -> None:
        """Forget an earlier wish to cancel, of one that is submitted or started again."""
        (self.path / "cancel.json").unlink(missing_ok=True)

    def claim(self, *, patience_seconds: float = claim.PATIENCE_SECONDS) -> AbstractContextManager[None]:
        """Hold the run for this process; the claim ends with the block, or with the process however it dies.

        Raises:
            ConfigError: another process holds it.
        """
        return claim.claimed(self.path, "run", patience_seconds=patience_seconds)


def check_runs(runs: Path | str) -> None:
    """Hold the folder of all runs to be one that can be written, without making it.

    Raises:
        ConfigError: it cannot.
    """
    folder = Path(runs).expanduser()
    if not str(runs).strip():
        raise ConfigError("runs", runs, "names no folder", "try runs")
    # What is there already decides: a folder that may be written, or something else in its place.
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    rule = None if there.is_dir() else f"cannot be written ({there} is no folder)"
    if rule is None and not os.access(there, os.W_OK | os.X_OK):
        rule = f"cannot be written (no permission in {there})"
    if rule is not None:
        raise ConfigError("runs", runs, rule, _OF_YOURS)


def create_run(
    runs: Path | str, *, sweep: str = "single", name: str, identity: Identity, config: Mapping[str, Any]
) -> RunFolder:
    """The folder of a run, made if it is not there: whole at once, so that racing processes get the same one.

    Args:
        config: the resolved recipe as plain values; frozen in config.yaml.

    Raises:
        ConfigError: a label that is no folder's name, a place that cannot be written, or a folder that
            belongs to another run.
    """
    for key, label in (("sweep", sweep), ("name", name)):
        if not _LABEL.fullmatch(label):
            rule = "becomes a folder's name: up to 100 letters, digits, '.', '_', '+', '-', the first a letter or digit"
            raise ConfigError(key, label, rule, f"try {key}=run-1")
    final = Path(runs).expanduser() / sweep / f"{name}-{identity.hash8}"
    part = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if not (final / "config.yaml").exists():
            for folder in _SUBFOLDERS:
                (part / folder).mkdir(parents=True)
            born = {"sha256": identity.sha256, "content": identity.content, "created": time.time()}
            write_json(part / "identity.json", {"schema": SCHEMA, **born})
            write_text(part / "config.yaml", config_text(config))
            RunFolder(part).write_status(Status(state="prepared"))
            # Fails where another process was faster: a folder with files in it is never replaced.
            part.rename(final)
    except OSError as error:
        if not (final / "config.yaml").exists():
            rule = f"cannot be written ({error.strerror or type(error).__name__})"
            raise ConfigError("runs", runs, rule, _OF_YOURS) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    run = open_run(final)
    kept = run.identity()
    if kept is not None and kept.sha256 != identity.sha256:
        raise ConfigError("name", name, f"{final} belongs to another run", f"try name={name}-2")
    return run


def open_run(path: Path | str) -> RunFolder:
    """The run in a folder.

    Raises:
        ConfigError: no run's folder.
    """
    path = Path(path).expanduser()
    if not (path / "config.yaml").is_file():
        rule = "has no config.yaml" if path.is_dir() else "is no folder"
        raise ConfigError("run", path, rule, "name the folder of a run, such as runs/single/quickstart-1a2b3c4d")
    return RunFolder(path)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file that nothing depends on; None where it is missing or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

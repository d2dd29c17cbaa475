"""Makes and writes the folder of a run, `runs/<sweep>/<name>-<hash8>/`."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records import claim
from titanlab.records.config_file import config_text
from titanlab.records.identity import Identity
from titanlab.records.logs import write_marks
from titanlab.records.metrics_file import MetricsWriter
from titanlab.records.outcome import Outcome, write_end
from titanlab.records.run_records import CHOSEN, SAVED, SCHEMA, STOPPED, RunRecords, Status, write_status
from titanlab.system.files import FolderGone, user_path, write_json, write_text

_LONGEST = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST - 1}}}")


def check_name(key: str, value: str) -> None:
    """Check that a name can be the name of a folder.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not _NAME.fullmatch(value):
        rule = f"becomes a folder's name: up to {_LONGEST} letters, digits, '.', '_' and '-'"
        raise ConfigError(key, value, rule, f"try {safe_name(value)}")


def safe_name(text: str, *, longest: int = _LONGEST, otherwise: str = "run") -> str:
    """A name like a text that fits the rule.

    Args:
        longest: how many characters it may have.
        otherwise: the name if no character of the text can stay.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:longest] or otherwise


_GIVE_WRITABLE = "give a folder of yours: try runs=~/runs"
_SUBFOLDERS = ("attempts", "checkpoints", "logs", "traces")


@dataclass(frozen=True)
class RunFolder(RunRecords):
    """One run on disk."""

    def note_chosen(self, attempt: int, step: int) -> None:
        """Note that the user has chosen the checkpoint of a step for an attempt."""
        write_json(self.attempt_folder(attempt) / CHOSEN, {"step": step})

    def begin_attempt(
        self, config: Mapping[str, Any], env: Mapping[str, Any] | None, *, patch: str | None = None
    ) -> int:
        """Make the folder of the next attempt; processes that call this at the same time get different numbers.

        Args:
            env: content of env.json; None for an attempt whose processes never started.
            patch: difference of the code to its commit, written as `code.patch`.

        Raises:
            ConfigError: something else stands where the folder of attempts or of logs was.
        """
        for parent in (self.path / "attempts", self.logs):
            if os.path.lexists(parent) and not parent.is_dir():
                raise ConfigError("run", parent, "is no folder", "remove it")
        for attempt in range(self.newest_attempt() + 1, 1_000_000):
            folder = self.attempt_folder(attempt)
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            try:
                # Somebody may have removed the logs of earlier attempts with their folder.
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
            # This is the result of an earlier attempt, whose own folder keeps it.
            (self.path / "result.json").unlink(missing_ok=True)
            return attempt
        raise AssertionError("a million attempts")

    def open_metrics(self, attempt: int, *, resumed_step: int = 0) -> MetricsWriter:
        """The writer of metrics.jsonl for an attempt that resumes from a step."""
        return MetricsWriter(self.path / "metrics.jsonl", attempt=attempt, resumed_step=resumed_step)

    def write_status(self, status: Status) -> None:
        """Replace status.json.

        Raises:
            FolderGone: the run's folder was moved or removed.
        """
        try:
            write_status(self.path / "status.json", status)
        except FileNotFoundError as error:
            if self.path.is_dir():
                raise
            raise FolderGone(str(self.path)) from error

    def write_result(self, outcome: Outcome) -> None:
        """Write the end of an attempt into the attempt's result, the run's result, and the status.

        Attempt 0 means that the run ended while it waited, outside any attempt; then only the run gets a result.
        """
        if outcome.attempt:
            folder = self.attempt_folder(outcome.attempt)
            write_end(self.path, folder / "result.json", outcome)
        write_end(self.path, self.path / "result.json", outcome)
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
        """Note which step an attempt saved last, so that a later attempt notices if that checkpoint was removed.

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
        """Write a rank's failure, one of those from which `outcome.first_cause` selects the cause."""
        folder = self.attempt_folder(outcome.attempt) / "failures"
        write_end(self.path, folder / f"rank-{outcome.rank or 0}.json", outcome)

    def keep_stopped(self, attempt: int, rank: int, words: str | None) -> None:
        """Keep a sentence about a rank that is stopped (SIGSTOP); None: the rank goes on."""
        path = self.attempt_folder(attempt) / STOPPED / f"rank-{rank}.json"
        if words is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"schema": SCHEMA, "words": words})

    def ask_to_cancel(self) -> None:
        """Ask the processes of the run, also of an attempt that starts now, to save and end as cancelled."""
        write_json(self.path / "cancel.json", {"by": f"titanlab cancel on {socket.gethostname()}", "time": time.time()})

    def withdraw_cancel(self) -> None:
        """Remove an earlier request to cancel, before the run is submitted or started again."""
        (self.path / "cancel.json").unlink(missing_ok=True)

    def claim(self, *, patience_seconds: float = claim.PATIENCE_SECONDS) -> AbstractContextManager[None]:
        """Lock the run for this process, as `claim.claimed` does.

        Raises:
            ConfigError: another process has the lock.
        """
        return claim.claimed(self.path, "run", patience_seconds=patience_seconds)


def check_runs(runs: Path | str) -> None:
    """Check that the folder of all runs can be written, without making it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = user_path(runs)
    if not str(runs).strip():
        raise ConfigError("runs", runs, "names no folder", "try runs")
    if (home := str(folder).partition("/")[0]).startswith("~"):
        # As a relative path it would be a folder of that name, which nobody means.
        raise ConfigError("runs", runs, f"{home} is no user of this host", _GIVE_WRITABLE)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    rule = None if existing.is_dir() else f"cannot be written ({existing} is no folder)"
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
    """The folder of a run, made if it is missing; a rename publishes it, so that all processes get the same folder.

    Args:
        config: the resolved recipe as plain values; written to config.yaml.
        parent: `parent_run` and `parent_step` of a run that starts from another one's checkpoint.

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
            # Fails if another process was faster: a rename replaces no folder with files in it.
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
    """The run's id in trackers: the same whenever the run is begun in this folder, and another one anywhere else.

    Two people may train one recipe into one project, and a sweep may train it again on purpose: so the sweep, the
    folder and the user count too.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        # A container whose user has no name.
        user = str(os.getuid())
    text = "\n".join([identity.sha256, sweep, str(folder.absolute()), user])
    return f"{identity.hash8}-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:8]}"


def open_run(path: Path | str) -> RunFolder:
    """The run in a folder.

    Raises:
        ConfigError: it is no folder of a run.
    """
    path = user_path(path)
    if not (path / "config.yaml").is_file():
        rule = "has no config.yaml" if path.is_dir() else "is no folder"
        raise ConfigError("run", path, rule, "name the folder of a run, such as runs/single/quickstart-1a2b3c4d")
    return RunFolder(path)

"""Watches one rank of a job: asks its worker to stop, ends it after failures of other ranks, records why it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from titanlab.distributed.ranks import look_seconds
from titanlab.distributed.silence import ANSWER_SECONDS, note_silence
from titanlab.distributed.watchdog import NATIVE_SIGN
from titanlab.launch.child import Child
from titanlab.launch.contract import StopReason
from titanlab.launch.escalation import Escalation
from titanlab.launch.job.job import say
from titanlab.launch.job.stop_file import FILE, read_stop
from titanlab.launch.memory_kills import memory_kills
from titanlab.records.outcome import Outcome, OutcomeKind, from_exit, says_oom
from titanlab.records.run_folder import RunFolder
from titanlab.system.processes import STOPPED, process_state

# When another rank has failed, a worker has this time to record its own state; after a hang it first writes its stacks.
GRACE_SECONDS = 5.0
HANG_GRACE_SECONDS = ANSWER_SECONDS
# From the result on disk to the end of the worker.
TEARDOWN_SECONDS = 30.0
# On a shared file system, files of other nodes may appear this much later.
SETTLE_SECONDS = 10.0
RESULT_SECONDS = 120.0
VISIBLE_SECONDS = 2.0
# Between two looks at the worker itself.
_POLL_SECONDS = 0.2


class RankWatch:
    """Watches one rank's worker in one attempt.

    Args:
        child: the worker.
        rank, world: of the worker.
        check_signals: called at every look; it may write the reason to stop.
        is_hurried: whether the worker must end without saving.
        is_first: whether the rank is the first one on its host.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        child: Child,
        *,
        rank: int,
        world: int,
        check_signals: Callable[[], None],
        is_hurried: Callable[[], bool] = lambda: False,
        is_first: bool = True,
    ) -> None:
        self._run, self._attempt, self._child = run, attempt, child
        self._rank, self._world, self._check_signals, self._is_hurried = rank, world, check_signals, is_hurried
        self._folder = run.attempt_folder(attempt)
        self._reason: StopReason | None = None
        self._look_seconds = look_seconds(world, is_first=is_first)
        self._look_at = 0.0
        self._kills = memory_kills()
        self._escalation = Escalation(run, attempt=attempt, world=world, say=say)
        self._ended_here = self._others_hang = False
        self._begin = time.time()

    def to_end(self) -> int:
        """Wait until the worker ends, and make sure that its reason is recorded. Returns its exit code."""
        end: float | None = None
        while (code := self._child.poll()) is None:
            if time.monotonic() + _POLL_SECONDS / 2 >= self._look_at:
                self._check_signals()
                names = self._names()
                if FILE in names:
                    self._pass_on()
                if end is None:
                    end = self._time_to_end(names)
                self._look_at = time.monotonic() + self._look_seconds
            is_due = self._escalation.is_due({self._rank: self._child.pid})
            is_stopped = self._others_hang and process_state(self._child.pid) in STOPPED
            if is_due or is_stopped or (end is not None and time.monotonic() > end):
                self._ended_here = True
                self._note_silence()
                code = self._child.kill()
                break
            time.sleep(_POLL_SECONDS)
        self._check_signals()
        self._pass_on()
        self._note(code)
        return code

    def _pass_on(self) -> None:
        if self._reason is None and (reason := read_stop(self._folder)) is not None:
            self._reason = reason
            self._escalation.asked(reason.kind, reason.cause)
            self._child.ask_to_stop(reason.kind, reason.cause)

    def _names(self) -> set[str]:
        """The names in the attempt's folder: one call of the file system instead of one for each file."""
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folder))
        return set()

    def _time_to_end(self, names: set[str]) -> float | None:
        """The time until which the worker may end by itself; None while nothing is wrong.

        Args:
            names: in the attempt's folder.
        """
        if "result.json" in names and self._run.result(self._attempt) is not None:
            return time.monotonic() + TEARDOWN_SECONDS
        if self._is_hurried() or self._nothing_to_save():
            return time.monotonic()
        noted = self._run.failures(self._attempt) if "failures" in names else []
        notes = [note for note in noted if note.rank != self._rank]
        if not notes:
            return None
        if any(note.kind is OutcomeKind.HANG for note in notes):
            self._others_hang = True
            self._child.show_stacks()
            return time.monotonic() + HANG_GRACE_SECONDS
        return time.monotonic() + GRACE_SECONDS

    def _nothing_to_save(self) -> bool:
        """Whether the job must stop and this attempt has not taken a step, so that there is nothing to save."""
        if self._reason is None:
            return False
        status = self._run.known_status()
        return status is not None and status.attempt == self._attempt and status.state == "starting"

    def _note_silence(self) -> None:
        """While other ranks hang: record that this worker does not answer, with what is known about it."""
        if self._run.result(self._attempt) is None:
            note_silence(self._run, self._rank, self._child.pid, since=self._begin)

    def _note(self, code: int) -> None:
        """Record why the worker ended, if it has not recorded that itself."""
        if self._ended_here and not self._reason:
            return
        if code == 0 and await_result(self._run, self._attempt, self._world, seconds=VISIBLE_SECONDS) is not None:
            return
        is_recorded = any(note.rank == self._rank for note in self._run.failures(self._attempt))
        if is_recorded or self._run.result(self._attempt) is not None:
            return
        self._run.write_failure(self._judged(code))

    def _judged(self, code: int) -> Outcome:
        outcome = from_exit(code, rank=self._rank, attempt=self._attempt, memory=self._kills.evidence())
        if self._reason is not None and code < 0:
            return replace(
                outcome,
                kind=self._reason.kind,
                cause=f"{self._reason.cause}; it ended before it could save",
                echo=False,
            )
        output = self._child.output()
        if NATIVE_SIGN in output and code == 1:
            cause = "a step did not end in time, in native code that lets no other thread run; its log has the stacks"
            return replace(
                outcome,
                kind=OutcomeKind.HANG,
                cause=cause,
                traceback=output[output.rindex(NATIVE_SIGN) :],
                exit_code=OutcomeKind.HANG.exit_code,
            )
        # A killed worker cannot log a reason: do not take the end of its log for one.
        if outcome.kind is OutcomeKind.CRASH and code not in (0, -signal.SIGKILL):
            line = next((line.strip() for line in reversed(output.splitlines()) if says_oom(line)), None)
            if line is not None:
                outcome = replace(outcome, kind=OutcomeKind.OOM, cause=f"{line[:300]} ({outcome.cause})")
            return replace(outcome, traceback=_last(output) or None)
        return outcome


def await_result(run: RunFolder, attempt: int, world: int, *, seconds: float = RESULT_SECONDS) -> Outcome | None:
    """The attempt's result, which another process writes; None if it does not appear in time."""
    end = time.monotonic() + seconds
    while (result := run.result(attempt)) is None and time.monotonic() < end:
        time.sleep(look_seconds(world))
    return result


def settle(run: RunFolder, attempt: int, world: int) -> None:
    """Wait until the other ranks have recorded why they ended, at most SETTLE_SECONDS."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        notes = run.failures(attempt)
        primary = [note.ended for note in notes if not note.echo]
        if any(note.kind is OutcomeKind.HANG for note in notes):
            # To find the rank that blocks the others, wait for the records of all ranks.
            primary = []
        if len(notes) == world or (primary and time.time() > max(primary) + 1.0):
            return
        time.sleep(look_seconds(world))


def _last(text: str, lines: int = 40) -> str:
    """The end of a log, for a process that recorded nothing else."""
    return "\n".join(text.rstrip().splitlines()[-lines:])

"""Watches one rank of a job: asks its worker to stop, ends it when others have failed, and notes why it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from titanlab.distributed.silence import ANSWER_SECONDS, note_silence
from titanlab.distributed.watchdog import NATIVE_SIGN
from titanlab.launch.child import Child
from titanlab.launch.contract import StopReason
from titanlab.launch.job.stop_file import read_stop
from titanlab.launch.memory_kills import memory_kills
from titanlab.records.failure_signs import says_oom
from titanlab.records.outcome import Outcome, OutcomeKind, from_exit
from titanlab.records.run_folder import RunFolder

# For a worker whose peers have failed to say so itself; those that hang show where they stand first.
GRACE_SECONDS = 5.0
HANG_GRACE_SECONDS = ANSWER_SECONDS
# Between a result on disk and the end of a worker that has nothing left to do.
TEARDOWN_SECONDS = 30.0
# What other nodes write may be seen that much later.
SETTLE_SECONDS = 10.0
RESULT_SECONDS = 120.0
VISIBLE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_POLL_SECONDS_A_RANK = 0.004


class RankWatch:
    """Watches one rank's worker in one attempt.

    Args:
        child: the worker.
        rank, world: its place.
        hear: called at every look; may write the reason to stop.
        is_hurried: whether the worker is not to save.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        child: Child,
        *,
        rank: int,
        world: int,
        hear: Callable[[], None],
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run, self._attempt, self._child = run, attempt, child
        self._rank, self._world, self._hear, self._is_hurried = rank, world, hear, is_hurried
        self._folder = run.attempt_folder(attempt)
        self._reason: StopReason | None = None
        self._poll_seconds = _poll_seconds(world)
        self._kills = memory_kills()
        self._ended_here = False
        self._begin = time.time()

    def to_end(self) -> int:
        """Wait for the worker's end, and see to it that it has said why. Returns its exit code."""
        end: float | None = None
        while (code := self._child.poll()) is None:
            self._hear()
            self._pass_on()
            if end is None:
                end = self._time_to_end()
            elif time.monotonic() > end:
                self._ended_here = True
                self._note_silence()
                self._child.kill()
                continue
            time.sleep(self._poll_seconds)
        self._hear()
        self._pass_on()
        self._note(code)
        return code

    def _pass_on(self) -> None:
        if self._reason is None and (reason := read_stop(self._folder)) is not None:
            self._reason = reason
            self._child.ask_to_stop(reason.kind, reason.cause)

    def _time_to_end(self) -> float | None:
        """Until when the worker may end by itself; None as long as nothing is wrong."""
        if self._run.result(self._attempt) is not None:
            return time.monotonic() + TEARDOWN_SECONDS
        if self._is_hurried() or self._nothing_to_save():
            return time.monotonic()
        notes = [note for note in self._run.failures(self._attempt) if note.rank != self._rank]
        if not notes:
            return None
        if any(note.kind is OutcomeKind.HANG for note in notes):
            self._child.show_stacks()
            return time.monotonic() + HANG_GRACE_SECONDS
        return time.monotonic() + GRACE_SECONDS

    def _nothing_to_save(self) -> bool:
        """Whether the job is to stop and this attempt has not taken a step: what it would do is lost anyway."""
        if self._reason is None:
            return False
        status = self._run.known_status()
        return status is not None and status.attempt == self._attempt and status.state == "starting"

    def _note_silence(self) -> None:
        """Of a worker that does not say where it stands, while others hang, say what is known."""
        if self._run.result(self._attempt) is None:
            note_silence(self._run, self._rank, self._child.pid, since=self._begin)

    def _note(self, code: int) -> None:
        """Say why the worker ended, if it could not do that itself."""
        if self._ended_here and not self._reason:
            return
        if code == 0 and await_result(self._run, self._attempt, self._world, seconds=VISIBLE_SECONDS) is not None:
            return
        known = any(note.rank == self._rank for note in self._run.failures(self._attempt))
        if known or self._run.result(self._attempt) is not None:
            return
        self._run.write_failure(self._judged(code))

    def _judged(self, code: int) -> Outcome:
        outcome = from_exit(code, rank=self._rank, attempt=self._attempt, memory=self._kills.rose())
        if self._reason is not None and code < 0:
            return replace(
                outcome,
                kind=self._reason.kind,
                cause=f"{self._reason.cause}; it ended before it could save",
                echo=False,
            )
        said = self._child.said()
        if NATIVE_SIGN in said and code == 1:
            cause = "a step did not end in time, in native code that lets no other thread run; its log has the stacks"
            return replace(
                outcome,
                kind=OutcomeKind.HANG,
                cause=cause,
                traceback=said[said.rindex(NATIVE_SIGN) :],
                exit_code=OutcomeKind.HANG.exit_code,
            )
        # Whoever is killed says nothing of it: the end of its log would be taken for the reason.
        if outcome.kind is OutcomeKind.CRASH and code not in (0, -signal.SIGKILL):
            line = next((line.strip() for line in reversed(said.splitlines()) if says_oom(line)), None)
            if line is not None:
                outcome = replace(outcome, kind=OutcomeKind.OOM, cause=f"{line[:300]} ({outcome.cause})")
            return replace(outcome, traceback=_last(said) or None)
        return outcome


def await_result(run: RunFolder, attempt: int, world: int, *, seconds: float = RESULT_SECONDS) -> Outcome | None:
    """The attempt's result, which another process writes; None if it does not within a time."""
    end = time.monotonic() + seconds
    while (result := run.result(attempt)) is None and time.monotonic() < end:
        time.sleep(_poll_seconds(world))
    return result


def settle(run: RunFolder, attempt: int, world: int) -> None:
    """Wait until the other ranks have said why they ended, or have had the time to."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        notes = run.failures(attempt)
        own = [note.ended for note in notes if not note.echo]
        if any(note.kind is OutcomeKind.HANG for note in notes):
            # Who keeps the others waiting is known when all have spoken, or have not.
            own = []
        if len(notes) == world or (own and time.time() > max(own) + 1.0):
            return
        time.sleep(_poll_seconds(world))


def _poll_seconds(world: int) -> float:
    """Between two looks at the run's folder, which all ranks of a large job share."""
    return _POLL_SECONDS + _POLL_SECONDS_A_RANK * (world - 1)


def _last(text: str, lines: int = 40) -> str:
    """The end of a log: of a process that could not say more, it is what there is."""
    return "\n".join(text.rstrip().splitlines()[-lines:])

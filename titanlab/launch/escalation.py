"""When the ranks of this host have to be killed: a stop request has no effect, or a rank is stopped (SIGSTOP).

A stop request is forwarded to the ranks, which save and end. If they do not, their launcher kills all of them after a
grace, and a note says why. All launchers ask the same `Escalation` while they wait.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping

from titanlab.distributed.hang import LEAST_LIMIT_SECONDS
from titanlab.distributed.silence import STATES
from titanlab.distributed.stop import ONE_REQUEST_SECONDS, STOPS
from titanlab.errors import ConfigError
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.system.processes import STOPPED, process_state

# A rank that is stopped for this time is said, and is killed if the run was asked to stop.
STOPPED_SECONDS = 5.0
# After a second request; it is the time to write notes.
HURRY_SECONDS = 5.0
# After a request that arrives before the first step: nothing is to be saved.
START_SECONDS = 10.0
# After a request, without a further step or another state in status.json: a step and a save take less.
STOP_SECONDS = 600.0
_LOOK_SECONDS = 0.5


class Escalation:
    """Watches ranks of this host during one attempt.

    Args:
        world: number of ranks of the run; those on other hosts count too.
        say: called with a line for the user.

    Attributes:
        is_over: whether the ranks must be killed: `is_due` has returned true.
        hangs: whether a rank keeps others waiting because it is stopped.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        attempt: int | None,
        world: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._attempt, self._world, self._say, self._clock = run, attempt, world, say, clock
        self._asked: tuple[OutcomeKind, str] | None = None
        self._asked_at = self._effect_at = self._hurried_at = 0.0
        self._progress: tuple[str, int] | None = None
        self._answer_due = False
        self._stopped_since: dict[int, float] = {}
        self._said: set[int] = set()
        self.hangs = self.is_over = False
        self._looked_at = -float("inf")

    def asked(self, kind: OutcomeKind, cause: str) -> None:
        """Note a stop request; a second one, over a second later, is that of somebody who does not want to wait."""
        now = self._clock()
        if self._asked is None:
            self._asked, self._asked_at, self._effect_at = (kind, cause), now, now
        elif not self._hurried_at and now - self._asked_at > ONE_REQUEST_SECONDS:
            self._hurried_at = now

    def signalled(self, number: int) -> None:
        """Note a stop request that is a signal to this process."""
        # A closed terminal ends a run as Ctrl-C does.
        kind = STOPS[signal.SIGINT if number == signal.SIGHUP else number]
        self._answer_due = self._asked is None and number in (signal.SIGINT, signal.SIGTERM)
        self.asked(kind, f"asked to end by {signal.Signals(number).name}")

    def is_due(self, pids: Mapping[int, int]) -> bool:
        """Whether all ranks must be killed now, because a stop request has no effect; then a note says why.

        If a rank keeps the others waiting because it is stopped, a note says that it hangs.

        Args:
            pids: process by rank, for the ranks of this host that have not ended.
        """
        if self._answer_due:
            self._answer()
        if self._clock() - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = self._clock()
        stopped = self._look_for_stopped(pids)
        if self._asked is None:
            self._note_hang(stopped)
            return False
        why = self._why(stopped)
        if why is None:
            return False
        self.is_over = True
        kind, cause = self._asked
        rank = min(stopped or pids, default=0)
        self._note(kind, rank, f"{cause}; {why}, so all ranks were killed{self._lost()}")
        return True

    def _answer(self) -> None:
        """Tell the person at the terminal what becomes of the request; not in the signal's handler."""
        self._answer_due = False
        state = self._state()[0]
        if state in ("running", "saving"):
            what = "stopping after this step, then saving" if state == "running" else "stopping when this is saved"
            self._say(f"{what}. A second Ctrl-C ends the run now{self._lost()}")

    def _look_for_stopped(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Ranks that have been stopped for a while, with the states of their processes."""
        states = {rank: state for rank, pid in pids.items() if (state := process_state(pid)) in STOPPED}
        now = self._clock()
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in states}
        long = {rank: states[rank] for rank, since in self._stopped_since.items() if now - since >= STOPPED_SECONDS}
        for rank in long.keys() - self._said:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - now + self._stopped_since[rank]))
            waits = ", and the others wait for it" if self._world > 1 else ""
            command = f"`kill -CONT {pids[rank]}` on {socket.gethostname()}"
            resume = f": {command} lets it go on" if states[rank] == "T" else ""
            words = f"rank {rank}: {STATES[states[rank]]} since {since}{waits}{resume}"
            self._say(words)
            self._keep_stopped(rank, words)
        for rank in self._said - long.keys():
            self._keep_stopped(rank, None)
        self._said = set(long)
        return long

    def _keep_stopped(self, rank: int, words: str | None) -> None:
        # `status` and `diagnose` show it, perhaps on another host. A full disk must not end the watch.
        with contextlib.suppress(OSError):
            self._run.keep_stopped(self._number(), rank, words)

    def _note_hang(self, stopped: Mapping[int, str]) -> None:
        """Note that a rank hangs if it keeps others waiting for as long as a step may take."""
        limit = self._limit()
        if self.hangs or self._world == 1 or limit is None:
            return
        for rank, state in stopped.items():
            # With a debugger, somebody looks at the rank at present. In a step, ranks that wait note it before.
            if state == "T" and self._clock() - self._stopped_since[rank] >= limit + STOPPED_SECONDS:
                self.hangs = True
                what = f"a rank was stopped for {limit:g} s"
                self._note(OutcomeKind.HANG, rank, f"{what}: rank {rank} does not answer: {STATES[state]}")

    def _limit(self) -> float | None:
        """Seconds that a rank may be stopped; None: any."""
        with contextlib.suppress(ConfigError, AttributeError):
            limit = self._run.config(self._number()).get("training", {}).get("step_timeout_seconds")
            return LEAST_LIMIT_SECONDS if limit is None else float(limit) or None
        return LEAST_LIMIT_SECONDS

    def _why(self, stopped: Mapping[int, str]) -> str | None:
        """Why the ranks must be killed after a stop request, as a clause; None: they need not yet."""
        now, (state, step) = self._clock(), self._state()
        if (state, step) != self._progress:
            self._progress, self._effect_at = (state, step), now
        if stopped:
            rank = min(stopped)
            return f"rank {rank} did not end ({STATES[stopped[rank]]})"
        if self._hurried_at:
            return "asked again" if now - self._hurried_at >= HURRY_SECONDS else None
        limit = START_SECONDS if state in ("starting", "ended") else STOP_SECONDS
        return f"its ranks did not end within {limit:g} s" if now - self._effect_at >= limit else None

    def _state(self) -> tuple[str, int]:
        """State and step of this attempt, as status.json has them."""
        status = self._run.known_status()
        return ("starting", 0) if status is None or status.attempt != self._number() else (status.state, status.step)

    def _lost(self) -> str:
        lost = self._run.lost_steps()
        return f"; {lost}" if lost else ""

    def _number(self) -> int:
        return self._attempt or self._run.newest_attempt()

    def _note(self, kind: OutcomeKind, rank: int, cause: str) -> None:
        # The ranks are killed also where the disk takes no note.
        with contextlib.suppress(OSError):
            step = self._state()[1]
            self._run.write_failure(Outcome(kind=kind, rank=rank, step=step, attempt=self._number(), cause=cause))

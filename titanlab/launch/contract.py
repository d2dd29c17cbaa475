"""The contract of a launcher: its config, its methods, and the values that they exchange.

A launcher is a folder, here or in another package (docs/extending.md). Runs, sweeps and verbs call only these methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from titanlab.recipe import LaunchSettings
from titanlab.records import OutcomeKind
from titanlab.records import StopReason as StopReason

if TYPE_CHECKING:
    from titanlab.distributed import Ranks
    from titanlab.launch.submission import JobShape, Submission
    from titanlab.recipe import Recipe
    from titanlab.system import Finding

# `JobState.raw` of a job whose scheduler does not answer.
UNANSWERED = "UNKNOWN"
# Identifies a job: the token of its submission, and the job's index in that submission.
JobKey = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of one job.

    Attributes:
        state: `pending`, `running`, `requeued` (it waits to continue), `ended`, `gone` (the scheduler does not know it,
            or no longer), or `unknown` (the scheduler does not answer).
        raw: the scheduler's own name of the state, without details; UNANSWERED if the scheduler does not answer.
        exit_code: exit code of the job; -N if signal N ended the job or its step; None while the job runs, or unknown.
        reason: why the job waits or failed, in the scheduler's words; or why the scheduler does not answer.
        elapsed_seconds: run time of the job's latest start.
        nodes: names of its nodes.
        job_id: its number in the queue, with its index in the array.
    """

    state: str
    raw: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    elapsed_seconds: float | None = None
    nodes: tuple[str, ...] = ()
    job_id: str | None = None

    @property
    def never_started(self) -> bool:
        """Whether the job waits, or has ended without having run."""
        return self.state in ("pending", "ended") and not self.elapsed_seconds and not self.nodes


States = Mapping[JobKey, JobState]


@dataclass(frozen=True)
class MemoryWord:
    """The scheduler's most informative message about a job that it has killed because of its memory.

    Attributes:
        rank: the rank whose process was killed; None if the message names several ranks, or none.
    """

    said: str
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of a process in its job.

    Attributes:
        launcher: kind of the launcher.
        job_id: the job's number as the queue shows it, with the index in the array: `12_3`.
        raw_job_id: the accounting's number of this job, without an index; the last job of an array has the array's.
        restart: how often the job was put back into the queue.
        index: the job's index in its array; None: the job is not in an array.
        ranks: rank and world of this process, without the address of rank 0.
        nodes: names of the job's nodes.
    """

    launcher: str
    job_id: str
    raw_job_id: str
    restart: int = 0
    index: int | None = None
    ranks: Ranks
    nodes: tuple[str, ...]

    @property
    def start(self) -> str:
        """An identifier that only the processes of one start of the job share."""
        return f"{self.launcher}:{self.raw_job_id}.{self.restart}"

    @property
    def ranks_per_node(self) -> int:
        """Number of the job's ranks on each node."""
        return max(1, self.ranks.world // max(1, len(self.nodes)))

    def node_of(self, rank: int) -> str:
        """The node of a rank; the ranks of a job fill its nodes in order, equally many on each."""
        return self.nodes[min(rank // self.ranks_per_node, len(self.nodes) - 1)]


# The name by which launchers of other packages import `ProcessPlace`.
Place = ProcessPlace


class LaunchConfig(LaunchSettings, Protocol):
    """Config of a launcher: a dataclass that derives from this class.

    `LaunchSettings` has the fields; its values are the defaults of fields that a config does not define.
    """

    @property
    def title(self) -> str:
        """The launcher's name in texts for users."""
        return self.kind

    @abstractmethod
    def implementation(self) -> Launcher: ...


def launch_of(recipe: Recipe) -> LaunchConfig:
    """The launcher's config; composition refuses one that does not derive from `LaunchConfig`."""
    return cast(LaunchConfig, recipe.launch)


class Launcher(Protocol):
    """A way to start ranks: submits jobs and reports their states.

    A launcher keeps no state in memory: any process may ask about any job at any time.

    Attributes:
        has_scheduler: whether a scheduler decides when jobs start and records how they ended. Then it is asked only
            every few seconds, and its answers are stored beside the results.
        can_requeue: whether a job can put itself back into the queue (`requeue`).
        replaced_in_paths: characters that a sweep's path must not contain, as the scheduler would replace them.
        repeats_signals: whether a job gets several signals for one reason. If not, a second signal comes from a user
            who does not want to wait.
    """

    has_scheduler: bool = False
    can_requeue: bool = False
    replaced_in_paths: str = ""
    repeats_signals: bool = False

    # Submission, in the user's process

    def is_here(self) -> bool:
        """Whether jobs can be submitted from this host."""
        return True

    def silence(self) -> str | None:
        """Why the scheduler does not answer, in one line; None if it answers."""
        return None

    def check(self, jobs: Sequence[tuple[LaunchConfig, JobShape]]) -> None:
        """Check before a submission that the scheduler can take these jobs; ConfigError: it cannot."""
        return  # the default; mypy takes an empty body for an abstract method

    def findings(self) -> Iterator[Finding]:
        """What `titanlab doctor` reports of this launcher: whether jobs can be submitted from this host, and run."""
        yield from ()

    def max_array(self, *, is_answered: bool = True) -> int | None:
        """The largest number of jobs in one submission; None: any number."""
        return None

    def submit(self, sweep: Path, submission: Submission) -> str:
        """Submit jobs. Returns the scheduler's number of them.

        If this process is killed here, no other process submits the jobs again before `find` has looked for them.

        Raises:
            ConfigError: the scheduler refuses, or does not answer in time.
        """
        raise NotImplementedError

    def find(self, sweep: Path, submission: Submission) -> str | None:
        """The scheduler's number of a submission's jobs that wait, run or have ended; None if it has no such jobs.

        Raises:
            ConfigError: the scheduler does not answer, so that the jobs may or may not exist.
        """
        raise NotImplementedError

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        """The state of every job of these submissions."""
        raise NotImplementedError

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        """End jobs; skips jobs that have already ended. With `is_gentle` jobs get the time to save.

        Raises:
            ConfigError: the scheduler does not answer.
        """
        raise NotImplementedError

    def wake(self, sweep: Path) -> bool:
        """Start the process that runs the sweep's jobs on this host. Returns whether it was started."""
        return False

    def job_number(self, submission: Submission, index: int) -> str | None:
        """The number of one job as the user sees it; None while it has none."""
        return submission.job_id

    # After a job

    def end_of(self, state: JobState) -> StopReason | None:
        """Why a job ended, if the scheduler's state alone explains it."""
        return None

    def end_in_queue(self, state: JobState) -> StopReason | None:
        """Why a job that never started has ended, if the scheduler's state alone explains it."""
        return None

    def memory_word(self, sweep: Path, submission: Submission, index: int) -> MemoryWord | None:
        """The scheduler's message about a job that it killed because of its memory."""
        return None

    def early_end(self, sweep: Path, submission: Submission, index: int) -> str | None:
        """Why a job failed before its run began, in one line; None if that is not known.

        Called only for jobs that have ended without beginning an attempt.
        """
        return None

    # In a process of a job

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        """The place that this launcher gave to a job's process; ConfigError: a variable is missing or not a number."""
        raise NotImplementedError

    def addresses(self, place: ProcessPlace, environ: Mapping[str, str]) -> Iterator[str]:
        """Names under which the first of several nodes may be reachable, best first."""
        yield from place.nodes[:1]

    def cores(self, environ: Mapping[str, str]) -> int | None:
        """Cores that were given to this process; None: it shares the host's cores."""
        return None

    def name_job(self, place: ProcessPlace, name: str) -> None:
        """Give one job of an array its own name, if the scheduler lets the job's owner do so."""
        return  # the default; mypy takes an empty body for an abstract method

    def stop_reason(self, signal_name: str, place: ProcessPlace, *, signal_seconds: float) -> StopReason:
        """Why a job got a signal; the job asked for a warning `signal_seconds` before its time limit."""
        return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"asked to end by {signal_name}; the run can be resumed")

    def requeue(self, place: ProcessPlace) -> str | None:
        """Put the job of this process back into the queue. Returns the reason of a failure; None if it worked."""
        return "this launcher has no queue"

    def lost_nodes(self, place: ProcessPlace) -> frozenset[str]:
        """Names of the nodes that the scheduler has taken from this running job because they failed."""
        return frozenset()

    def requeue_on_fewer(self, place: ProcessPlace, *, least: int, most: int) -> str | None:
        """Put the job back as `requeue` does, to start on `least` to `most` nodes."""
        return self.requeue(place)

    def ranks_in(self, environ: Mapping[str, str]) -> Ranks | None:
        """The rank of a process that the scheduler itself has started as one of several; None: it has not."""
        return None

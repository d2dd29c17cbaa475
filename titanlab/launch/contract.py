"""What a launcher is: the contract of its config, of the launcher itself, and the values that they exchange.

A launcher is a folder, here or in another package (docs/extending.md). Runs, sweeps and verbs ask these methods only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.records.outcome import OutcomeKind

if TYPE_CHECKING:
    from titanlab.distributed.ranks import Ranks
    from titanlab.launch.shape import Shape
    from titanlab.launch.submission import Submission

# `JobState.raw` of a job whose scheduler does not answer.
UNANSWERED = "UNKNOWN"
# Jobs by the token of their submission and their index in it.
JobKey = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of one job.

    Attributes:
        state: `pending`, `running`, `requeued` (it waits to go on), `ended`, `gone` (the scheduler does not know it, or
            no longer), or `unknown` (the scheduler does not answer).
        raw: the scheduler's own word, without what follows it; UNANSWERED where it does not answer.
        exit_code: of the job, -N where signal N ended it or its step; None while it lives, or where it is not known.
        reason: why it waits, or failed, in the scheduler's word; or why the scheduler does not answer.
        elapsed_seconds: of its latest start.
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
        """Whether it has ended, or waits, and had no time on any node."""
        return self.state in ("pending", "ended") and not self.elapsed_seconds and not self.nodes


States = Mapping[JobKey, JobState]


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """Why a job ended, as its scheduler says it."""

    kind: OutcomeKind
    cause: str


@dataclass(frozen=True)
class MemoryWord:
    """What a scheduler says of a job that it has killed for its memory.

    Attributes:
        said: its sentence; the most informative one if there are several.
        rank: whose process that was; None where it names several, or none.
    """

    said: str
    rank: int | None


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """Why a job is to end.

    Attributes:
        kind: `cancelled`, `preempted` or `walltime`.
        cause: in a line.
    """

    kind: OutcomeKind
    cause: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in its job.

    Attributes:
        launcher: its kind.
        job_id: as the queue shows it, with the index in the array: `12_3`.
        raw_job_id: the number of this job alone in the accounting; the last job of an array has the array's number.
        restart: how often the job was put back into the queue.
        index: its index in the array; None: it is in none.
        ranks: of this process; without an address.
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
        """Shared by the processes of one start of the job, and by no others."""
        return f"{self.launcher}:{self.raw_job_id}.{self.restart}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended badly.

    Attributes:
        rank: its number.
        exit_code: of its process; -N where signal N ended it.
    """

    rank: int
    exit_code: int


class LaunchConfig(Protocol):
    """Config of a launcher: a dataclass that derives from this class; what it leaves out has these values.

    Attributes:
        kind: its name.
        threads: of one process (OMP_NUM_THREADS); None: the cores that the process has, or its share of the host's.
        cpus_per_task: cores of one process; None: the launcher's choice.
        memory_gib: host memory of one node; None: the launcher's choice.
        minutes: time limit of a job; None: the launcher's choice, or none.
        signal_seconds: how long before its time limit a job is told to save and end.
        requeue: whether a job that was preempted, or whose time is over, goes back into the queue by itself.
        max_requeues: how often at most.
    """

    kind: str
    threads: int | None = None
    cpus_per_task: int | None = None
    memory_gib: float | None = None
    minutes: int | None = None
    signal_seconds: int = 0
    requeue: bool = False
    max_requeues: int = 0

    @property
    def runs_here(self) -> bool:
        """Whether jobs run on this host, whose devices and memory then are those of the cluster."""
        return False

    @property
    def starts_directly(self) -> bool:
        """Whether `titanlab train` starts ranks itself and waits for them (`Launcher.start`), without a queue."""
        return False

    def check(self, setting: Setting) -> None:
        """Check the rest of the recipe against what this launcher needs.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def implementation(self) -> Launcher:
        """The launcher."""
        raise NotImplementedError


class Launcher(Protocol):
    """A way to start ranks: hands jobs over, and says what becomes of them.

    It keeps no state in memory: any process may ask about any job, at any time.

    Attributes:
        has_scheduler: whether a scheduler decides when jobs start and knows how they ended. Then it is asked every few
            seconds only, and its words are kept beside results.
        can_requeue: whether a job can be put back into the queue by itself (`requeue`).
        repeats_signals: whether a job gets several signals for one reason. Where it does not, a second one is a
            person's, who does not want to wait.
    """

    has_scheduler: bool = False
    can_requeue: bool = False
    repeats_signals: bool = False

    # Submitting, in a process of the person's

    def is_here(self) -> bool:
        """Whether jobs can be submitted from this host."""
        return True

    def silence(self) -> str | None:
        """Why the scheduler does not answer, in a line; None where it does."""
        return None

    def check(self, jobs: Sequence[tuple[LaunchConfig, Shape]]) -> None:
        """Check that jobs can be submitted, as far as the scheduler tells.

        Raises:
            ConfigError: they cannot.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def max_array(self, *, is_answered: bool = True) -> int | None:
        """How many jobs one submission takes; None: any number.

        Args:
            is_answered: the scheduler can be asked.
        """
        return None

    def submit(self, sweep: Path, submission: Submission) -> str:
        """Ask for the jobs of a submission. Returns the scheduler's number of them.

        A process that is killed here is repeated by nobody: `find` says whether the jobs are there.

        Raises:
            ConfigError: the scheduler refuses, or does not answer in time.
        """
        raise NotImplementedError

    def find(self, sweep: Path, submission: Submission) -> str | None:
        """The scheduler's number of a submission's jobs, whether they wait, run or have ended; None if it has none.

        Raises:
            ConfigError: the scheduler does not answer, so that nothing is known.
        """
        raise NotImplementedError

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        """The state of every job of these submissions."""
        raise NotImplementedError

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        """End jobs; those that have ended are passed over.

        Args:
            report: called with each line for a person.
            is_gentle: they run, and are given the time that they need to save.

        Raises:
            ConfigError: the scheduler does not answer.
        """
        raise NotImplementedError

    def wake(self, sweep: Path) -> bool:
        """Start what has to run on this host as long as the sweep has jobs. Returns whether it was started."""
        return False

    def job_number(self, submission: Submission, index: int) -> str | None:
        """The number of one job as a person sees it; None while it has none."""
        return submission.job_id

    # After a job

    def end_of(self, state: JobState) -> JobEnd | None:
        """Why a job ended, where the scheduler's word says so by itself."""
        return None

    def end_in_queue(self, state: JobState) -> JobEnd | None:
        """Why a job that never started ended, where the scheduler's word says so by itself."""
        return None

    def memory_word(self, sweep: Path, submission: Submission, index: int) -> MemoryWord | None:
        """What the scheduler says of a job that it has killed for its memory; None where it says nothing."""
        return None

    # In a process of a job

    def place_in(self, environ: Mapping[str, str]) -> Place:
        """The place that this launcher gave a process of a job.

        Raises:
            ConfigError: a variable is missing or is no number.
        """
        raise NotImplementedError

    def addresses(self, place: Place, environ: Mapping[str, str]) -> Iterator[str]:
        """Names under which the first node of several may be reached, best first."""
        yield from place.nodes[:1]

    def cores(self, environ: Mapping[str, str]) -> int | None:
        """Cores that were given to this process; None: it shares the host's."""
        return None

    def name_job(self, place: Place, name: str) -> None:
        """Show a job of an array under a name of its own, where the scheduler lets its owner do that."""
        return  # the default; mypy takes an empty body for an abstract method

    def stop_reason(self, signal_name: str, place: Place, *, signal_seconds: float) -> StopReason:
        """What a signal to a job means, where titanlab itself has not sent it.

        Args:
            signal_seconds: how long before its time limit the job asked to be warned.
        """
        return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"asked to end by {signal_name}; the run can be resumed")

    def requeue(self, place: Place) -> str | None:
        """Put this process's job back into the queue. Returns what speaks against it."""
        return "this launcher has no queue"

    # Without a queue

    def start(self, folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
        """Run `titanlab.worker FOLDER` as `world` ranks and wait for their end (`LaunchConfig.starts_directly`).

        Args:
            folder: of the run.
            attempt: that has begun.
            logs: for what ranks other than 0 print.

        Returns:
            the ranks that ended badly, by rank.
        """
        rule = "submits jobs, and starts no ranks itself"
        raise ConfigError("launch", type(self).__name__, rule, "submit the run with titanlab sweep")

    def ranks_in(self, environ: Mapping[str, str]) -> Ranks | None:
        """The rank of a process that the scheduler, and not a launcher, has started as one of several; None: it is not.

        Raises:
            ConfigError: a variable that belongs to the set is missing or is no number.
        """
        return None

"""launch=slurm: arrays of jobs of a Slurm cluster, identified by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.distributed.ranks import Ranks
from titanlab.launch.contract import (
    JobEnd,
    JobKey,
    JobState,
    LaunchConfig,
    Launcher,
    MemoryWord,
    ProcessPlace,
    StopReason,
)
from titanlab.launch.evidence import early_end
from titanlab.launch.slurm import batch, job, queue, states
from titanlab.launch.slurm.command import ask_slurm
from titanlab.launch.slurm.job import joined_step
from titanlab.launch.slurm.queue import check_slurm
from titanlab.launch.slurm.states import memory_word, slurm_states
from titanlab.launch.slurm_schema import Slurm
from titanlab.launch.submission import JobShape, Submission, check_submitit, has_submitit, jobs_folder
from titanlab.system.text import Finding


class SlurmLauncher(Launcher):
    """Jobs of a Slurm cluster.

    Args:
        config: for the jobs that are submitted.
    """

    has_scheduler = True
    can_requeue = True
    replaced_in_paths = "%\\"
    repeats_signals = True

    def __init__(self, config: Slurm) -> None:
        self._config = config

    def is_here(self) -> bool:
        return queue.is_here() and has_submitit()

    def silence(self) -> str | None:
        return ask_slurm("sinfo", "--noheader", "--format=%P").problem

    def check(self, jobs: Sequence[tuple[LaunchConfig, JobShape]]) -> None:
        queue.check(jobs)
        check_submitit("slurm")

    def findings(self) -> Iterator[Finding]:
        yield from check_slurm(self._config)

    def max_array(self, *, is_answered: bool = True) -> int:
        # Without an answer from Slurm, a number that every site takes.
        return queue.max_array() if is_answered else queue.MAX_ARRAY

    def submit(self, sweep: Path, submission: Submission) -> str:
        return batch.submit(self._config, sweep, submission)

    def find(self, sweep: Path, submission: Submission) -> str | None:
        return queue.find(submission.token, since=submission.created)

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        return slurm_states(submitted, sweep)

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        elements: dict[str, list[int]] = {}
        for submission, index in jobs:
            elements.setdefault(str(submission.job_id), []).append(index)
        queue.cancel(elements, is_gentle=is_gentle)

    def job_number(self, submission: Submission, index: int) -> str | None:
        return f"{submission.job_id}_{index}" if submission.job_id else None

    def end_of(self, state: JobState) -> JobEnd | None:
        return states.end_of(state)

    def end_in_queue(self, state: JobState) -> JobEnd | None:
        return states.end_in_queue(state)

    def memory_word(self, sweep: Path, submission: Submission, index: int) -> MemoryWord | None:
        word = memory_word(jobs_folder(sweep), f"{submission.job_id}_{index}")
        return None if word is None else replace(word, said=f"Slurm says: {word.said}")

    def early_end(self, sweep: Path, submission: Submission, index: int) -> str | None:
        # srun only says with which codes the tasks have ended.
        logs = jobs_folder(sweep).glob(f"{submission.job_id}_{index}_*_log.*")
        return early_end(logs, besides="srun: ")

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        return job.place_in(environ)

    def addresses(self, place: ProcessPlace, environ: Mapping[str, str]) -> Iterator[str]:
        return job.addresses(place, environ)

    def cores(self, environ: Mapping[str, str]) -> int | None:
        if (cores := environ.get("SLURM_CPUS_PER_TASK")) is not None:
            return int(cores)
        # Without `--cpus-per-task` srun shares the cores of the step on this node evenly.
        ranks, on_node = joined_step(environ), environ.get("SLURM_CPUS_ON_NODE", "")
        return max(1, int(on_node) // ranks.local_world) if ranks is not None and on_node.isdecimal() else None

    def name_job(self, place: ProcessPlace, name: str) -> None:
        job.name_job(place, name)

    def stop_reason(self, signal_name: str, place: ProcessPlace, *, signal_seconds: float) -> StopReason:
        return job.stop_reason(signal_name, place, signal_seconds=signal_seconds)

    def requeue(self, place: ProcessPlace) -> str | None:
        return job.requeue(place)

    def lost_nodes(self, place: ProcessPlace) -> frozenset[str]:
        return job.lost_nodes(place)

    def requeue_on_fewer(self, place: ProcessPlace, *, least: int, most: int) -> str | None:
        return job.requeue_on_fewer(place, least=least, most=most)

    def ranks_in(self, environ: Mapping[str, str]) -> Ranks | None:
        return joined_step(environ)

"""Submissions: one file for each array of jobs, in `submissions/` of the sweep's folder, with the shape of its jobs.

A submission is written before its jobs are submitted, with a token that ends the jobs' name in the queue. A process
that reads a submission without a job number asks the queue for the token: no job is submitted twice, and none is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titanlab.errors import ConfigError
from titanlab.recipe import Cluster, LaunchSettings
from titanlab.records import claimed, read_optional
from titanlab.system import counted, write_json

if TYPE_CHECKING:
    from titanlab.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """The resources of a job; jobs of one shape are submitted together.

    Attributes:
        nodes, tasks_per_node: their product is `processes`.
        gpus_per_node: devices of one node; 0 on CPU.
        minutes: time limit of the job; None: the site's default, or no limit.
    """

    processes: int
    nodes: int = 1
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    memory_gib: float | None = None
    minutes: int | None = None

    @property
    def gpu_hours(self) -> float | None:
        """Devices times the hours of the time limit; None without a time limit."""
        return None if self.minutes is None else self.gpus_per_node * self.nodes * self.minutes / 60

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def shape_of(recipe: Recipe) -> JobShape:
    """The shape of a resolved recipe's job: the smallest number of equally filled nodes.

    If possible, the ranks of a tensor-parallel group stay on one node.

    Raises:
        ConfigError: the cluster does not describe its nodes, or is too small.
    """
    world, cluster, launch = recipe.layout.world, recipe.cluster, recipe.launch
    on_gpus = cluster.accelerator == "cuda"
    if launch.runs_here:
        return JobShape(processes=world, tasks_per_node=world, gpus_per_node=world if on_gpus else 0)
    check_cluster(cluster, launch)
    per_node = cluster.per_node
    assert per_node is not None
    least = math.ceil(world / per_node)
    if cluster.nodes is not None and least > cluster.nodes:
        rule = f"is more than the cluster has, {counted(cluster.nodes, 'node')} with {per_node} processes each"
        raise ConfigError("world", world, rule, f"try world={cluster.nodes * per_node}, or another cluster")
    most = world if cluster.nodes is None else min(cluster.nodes, world)
    even = [count for count in range(least, most + 1) if world % count == 0]
    if not even:
        sizes = {count * tasks for count in range(1, most + 1) for tasks in range(1, per_node + 1)}
        fits = max(size for size in sizes if size < world)
        rule = f"does not fill nodes of {per_node} evenly, and the cluster has {cluster.nodes} nodes"
        raise ConfigError("world", world, rule, f"try world={fits}")
    nodes = next((count for count in even if world // count % recipe.layout.tensor == 0), even[0])
    return JobShape(
        processes=world,
        nodes=nodes,
        tasks_per_node=world // nodes,
        cpus_per_task=launch.cpus_per_task,
        gpus_per_node=world // nodes if on_gpus else 0,
        memory_gib=launch.memory_gib,
        minutes=launch.minutes,
    )


def check_cluster(cluster: Cluster, launch: LaunchSettings) -> None:
    """Check that a cluster describes its nodes: jobs run there, and this host's devices say nothing about them.

    Call it before a recipe is resolved: `resolve` replaces `auto` by values of this host.

    Raises:
        ConfigError: the accelerator or the size of a node is left to be detected.
    """
    if launch.runs_here:
        return
    cure = "name the nodes: cluster=h100, cluster=cpu or one of your own (docs/clusters.md)"
    if cluster.accelerator == "auto" or (cluster.accelerator == "cuda" and cluster.device is None):
        key = "accelerator" if cluster.accelerator == "auto" else "device"
        rule = f"is whatever this host has, and launch={launch.kind} runs elsewhere"
        raise ConfigError(f"cluster.{key}", getattr(cluster, key), rule, cure)
    if cluster.accelerator == "cuda" and cluster.device == "cpu":
        rule = "is what the recipe asks for, and the nodes of this cluster have none"
        cure = "name nodes with GPUs, such as cluster=h100, or try a recipe for CPUs"
        raise ConfigError("cluster.accelerator", "cuda", rule, cure)
    if cluster.per_node is None:
        rule = f"launch={launch.kind} derives the nodes of a job from it"
        raise ConfigError("cluster.per_node", None, rule, cure)


SCHEMA = 1
# Every call of sbatch locks this file in the sweep's folder: an sbatch may outlive the process that called it.
HANDING_OVER = ".sbatch"
# How long to wait for the claim of another process, which may take some seconds to submit many runs.
_CLAIM_SECONDS = 60.0
# Tokens, names of runs and numbers of jobs become paths and arguments of a scheduler's commands: allow no characters
# that are special to a shell, a file system, or a list of Slurm, such as commas.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+/-]")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """An array of jobs of one shape; the position of a run in `runs` is its index in the array.

    Attributes:
        token: unique; the name of the jobs ends with it.
        state: `intent` before the jobs are in the queue, `submitted` afterwards.
        job_id: the scheduler's number of the jobs; None in an intent.
        code: folder of the code that the jobs run, relative to the sweep's folder.
        folder: the folder from which it was submitted; relative paths in recipes are relative to it.
        changes: by run, the groups and values of its recipe that its next attempts replace: another layout.
        batch: the same for all arrays that were submitted together; empty: it was submitted alone.
        places: by index, the run's place among the runs of the batch, in the order in which they should start. A
            scheduler orders its arrays itself.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(5))
    launcher: str
    created: float = field(default_factory=time.time)
    state: Literal["intent", "submitted"] = "intent"
    job_id: str | None = None
    code: str
    folder: str = field(default_factory=os.getcwd)
    shape: JobShape
    launch: Mapping[str, Any]
    runs: tuple[str, ...]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batch: str = ""
    places: tuple[int, ...] = ()

    def job_name(self, sweep: str, index: int | None = None) -> str:
        """The name of a run's job in the queue; without `index`, the name that all jobs have until they start."""
        run = self.runs[index or 0] if index is not None or len(self.runs) == 1 else None
        return job_name(sweep, run, self.token)

    def command(self, sweep: Path, index: int | None = None) -> list[str]:
        """The arguments of the interpreter for every task of a job.

        Args:
            index: the job's; None: each task reads the index of its job from the environment (`Launcher.place_in`).
        """
        # -P: a clone in the current folder must not be imported instead of the snapshot.
        words = ["-P", "-m", "titanlab.launch.task", str(sweep), self.token]
        return words if index is None else [*words, str(index)]

    def environment(self, sweep: Path) -> dict[str, str]:
        """Variables with which Python imports the submitted code first, and does not search the current folder."""
        return {"PYTHONPATH": str(sweep / self.code), "PYTHONSAFEPATH": "1"}


def submissions(sweep: Path) -> list[Submission]:
    """All submissions of a sweep, oldest first; other and damaged files are skipped."""
    import msgspec

    submitted = []
    for path in (sweep / "submissions").glob("*.json"):
        value = read_optional(path)
        if value is None or value.get("schema") != SCHEMA:
            continue
        with contextlib.suppress(msgspec.ValidationError):
            submission = msgspec.convert(value, Submission)
            names = [submission.token, *submission.runs, *filter(None, [submission.job_id])]
            has_all_places = len(submission.places) in (0, len(submission.runs))
            if "token" in value and has_all_places and all(_NAME.fullmatch(name) for name in names):
                submitted.append(submission)
    return sorted(submitted, key=lambda submission: (submission.created, submission.token))


def write_submission(sweep: Path, submission: Submission) -> None:
    """Write or replace the file of a submission; it survives a power failure."""
    (sweep / "submissions").mkdir(exist_ok=True)
    write_json(submission_file(sweep, submission.token), {"schema": SCHEMA, **asdict(submission)}, durable=True)


def drop_submission(sweep: Path, submission: Submission) -> None:
    """Remove an intent that has no jobs; a job that starts in spite of this finds no submission, and ends."""
    submission_file(sweep, submission.token).unlink(missing_ok=True)


def submission_file(sweep: Path, token: str) -> Path:
    return sweep / "submissions" / f"{token}.json"


def claim_sweep(sweep: Path, *, patience_seconds: float = _CLAIM_SECONDS) -> AbstractContextManager[None]:
    """Claim a sweep's folder to submit, retry or cancel. ConfigError: another process holds the claim for too long."""
    return claimed(sweep, "sweep", patience_seconds=patience_seconds)


def jobs_folder(sweep: Path) -> Path:
    """The folder of a sweep's batch files and of the output of its tasks."""
    return sweep / "jobs"


def job_name(sweep: str, run: str | None, token: str) -> str:
    """The name of jobs in the queue: `SWEEP/RUN-TOKEN`, or `SWEEP-TOKEN` for several runs.

    Slurm's accounting keeps 255 characters.
    """
    prefix = sweep[:100] if run is None else f"{sweep[:100]}/{run[:110]}"
    return f"{_UNSAFE.sub('_', prefix)}-{token}"


def token_of(name: str) -> str:
    """The token at the end of a job's name; older jobs have the name `titanlab-TOKEN`."""
    return name.rpartition("-")[2]

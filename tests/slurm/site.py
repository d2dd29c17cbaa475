"""A place with a Slurm: where sweeps are submitted from, and what is asked of the queue and the accounting."""

from __future__ import annotations

import csv
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from tests.planted_package import install_planted
from tests.until import until
from titanlab.records import RunFolder
from titanlab.sweep import SweepFolder
from titanlab.sweep.sweep_folder import jobs_of

ROOT = Path(__file__).parent.parent.parent
# Two processes to a node, so that 1, 2, 4 and 8 processes take 1, 1, 2 and 4 nodes. A peak that is given need not be
# measured. The tests' data can fail at a step of a rank.
OPTIONS = {"hydra/sweeper": "space", "launch": "slurm", "cluster": "cpu", "data": "planted"}
SMALL = [
    *["launch.partition=high", "cluster.per_node=2", "cluster.nodes=4", "cluster.peak_tflops=1"],
    *["model.vocab_size=256", "training.seq_len=32", "training.global_batch=8", "training.log_every=1"],
    *["training.steps=6", "optimizer.schedule.warmup_steps=1"],
]


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


class Site:
    """A folder to work in, beside a running Slurm, with the tests' data installed.

    Args:
        folder: an empty one.
        config: slurm.conf of the Slurm.
        code: the clone of titanlab that is used.
    """

    def __init__(self, folder: Path, config: Path, code: Path = ROOT) -> None:
        self.folder = folder
        installed = install_planted(folder)
        (folder / "conf" / "sweeps").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(config), "PYTHONPATH": f"{code}:{installed}:{ROOT}"}

    # Commands

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "titanlab", *arguments]

    def titanlab(self, *arguments: str, seconds: float = 240) -> Said:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def submit(self, words: Sequence[str]) -> Said:
        said = self.titanlab(*words)
        assert said.code == 0, said.err
        return said

    def sweep_command(self, name: str, points: Sequence[dict[str, Any]], *values: str) -> list[str]:
        """The words for `titanlab` that submit a sweep of these points, whose file is written here.

        Args:
            values: what holds for those points that do not say otherwise, `training.steps=3`.
        """
        file = {
            "defaults": [{f"override /{group}": option} for group, option in OPTIONS.items()],
            "sweep": name,
            **OmegaConf.to_container(OmegaConf.from_dotlist([*SMALL, *values])),
            "hydra": {"mode": "MULTIRUN", "sweeper": {"space": {"list": list(points)}}},
        }
        path = self.folder / "conf" / "sweeps" / f"{name}.yaml"
        path.write_text("# @package _global_\n" + yaml.safe_dump(file, sort_keys=False))
        return ["sweep", "--config-dir", "conf", f"+sweeps={name}"]

    def slurm(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def bring_back(self, node: str, seconds: float = 60) -> None:
        """Let a node that is down take jobs again; it may come back by itself first, and then cannot be told to."""
        back = ("scontrol", "update", f"nodename={node}", "state=resume")

        def is_back() -> bool:
            subprocess.run(back, env=self.environment, capture_output=True, timeout=60, check=False)
            return "down" not in self.node_state(node)

        until(is_back, seconds, told=lambda: self.node_state(node))

    def fail(self, node: str) -> None:
        """Kill a node's daemon and all that jobs run there, and tell Slurm, which would need a minute to notice."""
        self._tool("fail", node)
        self.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=a test")

    def boot(self, node: str) -> None:
        """Start a node that has failed again, and wait until it takes jobs."""
        self._tool("boot", node)
        self.bring_back(node)

    def _tool(self, verb: str, node: str) -> None:
        folder = Path(self.environment["SLURM_CONF"]).parent
        tool = [sys.executable, ROOT / "launch" / "dev-slurm" / "dev-slurm", verb, folder, node]
        done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def node_state(self, node: str) -> str:
        """Slurm's word, in small letters: idle, mixed, down."""
        return self.slurm("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T", "--partition=low").strip()

    def accounting(
        self, *how: str, columns: str = "JobID,JobName,State,ExitCode,NNodes,NTasks"
    ) -> list[dict[str, str]]:
        """Rows of sacct, also those of a job's earlier starts."""
        said = self.slurm("sacct", "--parsable2", "--duplicates", "--allusers", f"--format={columns}", *how)
        return list(csv.DictReader(said.splitlines(), delimiter="|"))

    def starts(self, run: RunFolder) -> list[dict[str, str]]:
        """Rows of sacct for a run's job, one for each of its starts."""
        job = self.job_id(run)
        return [row for row in self.accounting(f"--jobs={job}", "--allocations") if row["JobID"] == job]

    # Sweeps

    def sweep(self, name: str) -> SweepFolder:
        return SweepFolder(self.folder / "runs" / name)

    def run(self, sweep: str, name: str) -> RunFolder:
        (run,) = [run for run in self.sweep(sweep).runs() if run.name == name]
        return run

    def job_id(self, run: RunFolder) -> str:
        """As `squeue` and `scancel` know the run's job: 12_3."""
        sweep = self.sweep(run.sweep)
        submission, index = jobs_of(sweep, sweep.submissions())[run.path.name]
        return f"{submission.job_id}_{index}"

    def rows(self, sweep: str) -> dict[str, dict[str, Any]]:
        """`titanlab status --json`, by the runs' labels; dropped points by the number of their row."""
        said = self.titanlab("status", sweep, "--json")
        assert said.code == 0, said.err
        rows = json.loads(said.out)
        return {row["name"] or str(number): row for number, row in enumerate(rows)}

    def waits_or_runs(self, sweep: str) -> list[str]:
        """Jobs of a sweep that have not come to their end, a requeued one's last."""
        numbers = {each.job_id for each in self.sweep(sweep).submissions()}
        lines = self.slurm("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return [line for line in lines if line.partition("_")[0] in numbers]

    def ended(self, sweep: str, seconds: float = 300) -> SweepFolder:
        """The sweep, once all of its jobs have come to their end, in the accounting too, which hears of it later."""
        _none_left(functools.partial(self.waits_or_runs, sweep), seconds)
        _none_left(functools.partial(self.unaccounted, sweep), seconds)
        return self.sweep(sweep)

    def unaccounted(self, sweep: str) -> list[str]:
        """Jobs of a sweep whose last start has no end in the accounting."""
        folder = self.sweep(sweep)
        jobs = {f"{each.job_id}_{index}" for each, index in jobs_of(folder, folder.submissions()).values()}
        arrays = {job.partition("_")[0] for job in jobs}
        rows = self.accounting("--allocations", f"--jobs={','.join(sorted(arrays))}", columns="JobID,End")
        # A later row of the same job is a later start.
        ends = {row["JobID"]: row["End"] for row in rows}
        for row in rows:
            # Elements that never started share a row; one that was cancelled by itself has none at all.
            array, _, places = row["JobID"].partition("_")
            if places.startswith("["):
                jobs -= {job for job in jobs if job.startswith(f"{array}_") and job not in ends}
        return sorted(job for job in jobs if ends.get(job, "Unknown") == "Unknown")

    def reached(self, run: RunFolder, step: int, seconds: float = 200) -> None:
        """Wait until a run has done so many steps."""
        until(lambda: len(run.metrics("train")) >= step, seconds, told=lambda: f"{run.path.name}: {run.status()}")


def _none_left(left: Callable[[], list[str]], seconds: float) -> None:
    # Each look is a process.
    until(lambda: not left(), seconds, told=lambda: str(left()), pause_seconds=0.25)


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["loss_metrics/global_avg_loss"]) for row in run.metrics("train")]

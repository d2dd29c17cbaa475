"""A real Slurm for all of these tests, and the sweeps that they look at: submitted at once, to run while tests wait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.site import ROOT, Said, Site

TOOL = ROOT / "launch" / "dev-slurm" / "dev-slurm"
FOUR = [
    {"name": "one", "parallelism": "single"},
    {"name": "two", "parallelism": "fsdp", "world": 2},
    {"name": "four", "parallelism": "fsdp_tp", "world": 4},
    {"name": "eight", "parallelism": "fsdp_tp_pp", "world": 8},
]
INFEASIBLE = [
    {"name": "heads", "parallelism": "tp", "parallelism.tensor": 8, "world": 8},
    {"name": "batch", "parallelism": "ddp", "world": 2, "training.global_batch": 3},
]
# Runs that differ in nothing that counts would be one run: each has a seed of its own.
TWO = {"parallelism": "ddp", "world": 2}
# Those that need a long time. Slurm looks at time limits twice a minute: of a minute, 29 to 59 s have passed when a job
# is warned of the last one.
LIMITS = [
    # Its signal finds a process that sleeps, so that Slurm itself ends it.
    {"name": "past_limit", "seed": 1, "data.fault": "hang", "data.step": 3},
    # Its processes are not even started.
    {"name": "late", "seed": 2, "launch.preamble": ["sleep 300"]},
    # More than a minute of steps.
    {
        "name": "requeued",
        "seed": 3,
        "data.seconds": 0.3,
        "training.steps": 210,
        "tracker": "wandb",
        "tracker.mode": "offline",
    },
    {"name": "cancelled", "seed": 4, "data.seconds": 0.3, "training.steps": 2000, "launch.minutes": 10},
]
ENDS = [
    {"name": "hangs", "seed": 5, **TWO, "data.fault": "hang", "data.step": 3, "data.rank": 1,
     "training.step_timeout_seconds": 15},
    {"name": "raises", "seed": 6, **TWO, "data.fault": "raise", "data.step": 3, "data.rank": 1},
    {"name": "killed", "seed": 7, **TWO, "data.fault": "kill", "data.step": 3, "data.rank": 1},
    {"name": "memory", "seed": 8, "data.fault": "memory", "data.step": 3, "launch.preamble": ["ulimit -v 6000000"]},
    # Slurm's own limit, by which it kills all processes of the job, and none is left to tell.
    {"name": "over", "seed": 10, "data.fault": "fill", "data.step": 3, "launch.memory_gib": 1},
]  # fmt: skip
# An array that is held until somebody cancels it: one element first, then all that are left.
NEVER = [{"name": f"never{number}", "seed": 20 + number} for number in range(3)]
# Preempted on n4, where nobody else of them is.
VICTIM = {"name": "victim", "seed": 9, **TWO, "training.steps": 80}


@pytest.fixture(scope="session")
def slurm_conf() -> Iterator[Path]:
    """slurm.conf of a Slurm that runs until the end of the tests."""
    # Sockets have short names: pytest's own folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="dev-slurm-", dir="/tmp"))
    try:
        started = subprocess.run([sys.executable, TOOL, "start", folder], capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stderr
        yield folder / "slurm.conf"
    finally:
        subprocess.run([sys.executable, TOOL, "stop", folder], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def site(slurm_conf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Where the sweeps of these tests are submitted."""
    site = Site(tmp_path_factory.mktemp("site"), slurm_conf)
    # What asks Slurm in this process asks this one.
    os.environ["SLURM_CONF"] = str(slurm_conf)
    yield site
    del os.environ["SLURM_CONF"]


@dataclass(frozen=True)
class Submitted:
    """The sweeps that most tests look at.

    Attributes:
        words: by the sweep's name, what submits it.
        said: by the sweep's name, what its submission said.
        higher: number of the job for which the victim was preempted.
    """

    words: dict[str, list[str]]
    said: dict[str, Said]
    higher: str


@pytest.fixture(scope="session")
def submitted(site: Site) -> Submitted:
    """All sweeps submitted, one job of them preempted and one cancelled."""
    elsewhere = "launch.exclude=n4"
    words = {
        "limits": site.sweep_command("limits", LIMITS, elsewhere, "launch.minutes=1", "launch.signal_seconds=1"),
        "preempted": site.sweep_command(
            "preempted", [VICTIM], "launch.partition=low", "launch.nodelist=n4", "data.seconds=0.4"
        ),
        "ends": site.sweep_command("ends", ENDS, elsewhere),
        "never": site.sweep_command("never", NEVER, "launch.extra={hold: true}"),
        "shapes": site.sweep_command("shapes", [*FOUR, *INFEASIBLE]),
        "calm": site.sweep_command("calm", [VICTIM], elsewhere),
    }
    # Time runs for these two: the others would keep the host from starting their processes.
    said = {name: site.submit(words[name]) for name in ("limits", "preempted")}
    site.reached(site.run("preempted", "victim"), 5)
    # All but one of the node's eight: only without the victim is there room.
    node = ["--partition=high", "--nodelist=n4", "--nodes=1", "--ntasks=7"]
    higher = site.slurm("sbatch", "--parsable", *node, "--time=1", "--output=/dev/null", "--wrap=sleep 1").strip()
    cancelled = site.run("limits", "cancelled")
    site.reached(cancelled, 3)
    site.slurm("scancel", site.job_id(cancelled))
    site.reached(site.run("limits", "requeued"), 3)
    said |= {name: site.submit(words[name]) for name in ("shapes", "ends", "calm", "never")}
    element = site.job_id(site.run("never", NEVER[0]["name"]))
    site.slurm("scancel", element)
    site.slurm("scancel", element.partition("_")[0])
    return Submitted(words, said, higher)

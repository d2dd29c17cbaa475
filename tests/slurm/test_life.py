"""Jobs that are signalled at points of a run's life: each has the right end, and leaves no process.

tests/launch/test_life.py has the same points under the other launchers.
"""

import subprocess

import pytest

from tests.until import until

pytestmark = pytest.mark.slurm

# Slurm says of a plain `scancel --signal=TERM` no more than the signal; `--signal=KILL` cancels the job.
ENDS = {
    ("compile", "TERM"): "cancelled",
    ("step", "TERM"): "cancelled",
    ("save", "TERM"): "cancelled",
    ("conclude", "TERM"): "done",
    ("compile", "KILL"): "cancelled",
    ("step", "KILL"): "cancelled",
    ("save", "KILL"): "cancelled",
}


@pytest.fixture(scope="module")
def lives(site, tmp_path_factory):
    """Rows of the table, once each job has been signalled at its point and has ended."""
    folders = {case: tmp_path_factory.mktemp("held") for case in ENDS}
    points = [
        {
            "name": "-".join(case),
            "seed": 40 + number,
            "data.seconds": 0.5,
            "checkpoint.every": 2,
            "launch.preamble": [f"export HOLD={case[0]} HOLD_FOLDER={folder}"],
        }
        for number, (case, folder) in enumerate(folders.items())
    ]
    site.submit(site.sweep_command("life", points, "launch.exclude=n4", "launch.requeue=false"))
    for (point, signal), folder in folders.items():
        until(lambda folder=folder: list(folder.glob("held-*")), 300)
        site.slurm("scancel", f"--signal={signal}", site.job_id(site.run("life", f"{point}-{signal}")))
        (folder / "go").touch()
    site.ended("life")
    return site.rows("life")


@pytest.mark.parametrize(("point", "signal"), ENDS)
def test_a_job_that_is_signalled_at_a_point(site, lives, point, signal):
    name = f"{point}-{signal}"
    assert lives[name]["outcome"] == ENDS[point, signal]
    path = site.run("life", name).path
    until(lambda: subprocess.run(["pgrep", "-f", str(path)], capture_output=True, check=False).returncode == 1, 20)

"""`titanlab train` as a process of its own, and what becomes of the processes that it starts."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.planted_package import install_planted
from tests.until import until
from titanlab.records import RunFolder, list_runs

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    *["model.vocab_size=256", "training.seq_len=32", "training.global_batch=4", "training.log_every=1"],
    *["optimizer.schedule.warmup_steps=1", "cluster.peak_tflops=1", "data=planted"],
]


class Command:
    """`titanlab train` in a folder of its own, with the tests' data installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": f"{install_planted(folder)}:{ROOT}"}

    def start(self, *overrides, launcher=("-m", "titanlab")) -> subprocess.Popen[str]:
        # A session of its own, as a terminal gives it: a Ctrl-C there reaches all of its process group.
        return subprocess.Popen(
            [sys.executable, *launcher, "train", "--config-dir", "conf", *SMALL, *overrides],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *overrides, **how) -> tuple[int, str, str]:
        return finished(self.start(*overrides, **how))

    @property
    def only_run(self) -> RunFolder:
        (run,) = list_runs(self.folder / "runs")
        return run

    def reached(self, step: int) -> RunFolder:
        """The run, once it has done so many steps."""
        until(lambda: [run for run in list_runs(self.folder / "runs") if len(run.metrics("train")) >= step])
        return self.only_run


def finished(process) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state parent …
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

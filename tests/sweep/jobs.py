"""A sweep's folder with one run in it, and its job's processes as the launcher of docs/extending.md starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import tiny
from tests.launch.third import install_third
from tests.planted_package import install_planted
from tests.planted_schema import Planted
from titanlab.launch import JobShape, Submission, write_submission
from titanlab.recipe import to_mapping
from titanlab.records import RunFolder, create_run, identify
from titanlab.sweep import SweepFolder
from titanlab.sweep.sweep_folder import jobs_of

ROOT = Path(__file__).parent.parent.parent


class Jobs:
    """Makes runs of one sweep, and starts their jobs' ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (install_planted(folder), install_third(folder), ROOT))),
        }
        self.processes: list[subprocess.Popen[str]] = []
        self.started = 0

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.folder / "runs" / "sweep")

    def run(self, world: int, *, launcher: str = "nohup", name: str = "run", **given) -> RunFolder:
        """A run that nobody has begun, with a submission of its own."""
        data = Planted(**{key: given.pop(key) for key in list(given) if key in Planted.__dataclass_fields__})
        layout = {"replicate": world} if world > 1 else {}
        made = tiny.recipe(self.folder / "runs", sweep="sweep", name=name, data=data, **layout, **given)
        identity = identify(made, data="tiny", hardware="cpu", repeat=made.repeat)
        run = create_run(made.runs, sweep=made.sweep, name=name, identity=identity, config=to_mapping(made))
        self.submit(run, world, launcher=launcher)
        return run

    def submit(self, run: RunFolder, world: int, *, launcher: str = "nohup") -> Submission:
        submission = Submission(
            token=f"{len(self.sweep.submissions()):010x}",
            launcher=launcher,
            code="code",
            state="submitted",
            job_id="7",
            shape=JobShape(processes=world, tasks_per_node=world),
            launch={},
            runs=(run.path.name,),
        )
        write_submission(self.sweep.path, submission)
        if not (self.sweep.path / "code").exists():
            # What runs here is what was submitted.
            (self.sweep.path / "code").symlink_to(ROOT)
        return submission

    def job_of(self, run: RunFolder) -> tuple[Submission, int]:
        """The latest submission that has the run, and its index there."""
        return jobs_of(self.sweep, self.sweep.submissions())[run.path.name]

    def start(self, run: RunFolder, world: int, *, preamble: str = "", **environment) -> list[subprocess.Popen[str]]:
        """The ranks of the run's latest job."""
        submission, _ = self.job_of(run)
        self.started += 1
        command = [sys.executable, "-m", "titanlab.launch.task", str(self.sweep.path), submission.token, "0"]
        if preamble:
            command = ["sh", "-c", f'{preamble}; exec "$@"', "sh", *command]
        ranks = [
            subprocess.Popen(
                command,
                cwd=self.folder,
                env={
                    **self.environment,
                    "NOHUP_JOB": f"{os.getpid()}{self.started:03d}",
                    "NOHUP_WORLD": str(world),
                    "NOHUP_RANK": str(rank),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        self.processes += ranks
        return ranks

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def ended(ranks, seconds=300.0) -> tuple[list[int], str]:
    """Exit codes by rank, and all that was said."""
    said = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(said)


def send(ranks, number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)

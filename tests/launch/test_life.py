"""The life of a run, ended at each of its points, under each way to start it.

What a person or a scheduler signals is what they have started: `titanlab train`, torchrun, or all tasks of a job. After
SIGTERM and SIGKILL nobody is left 20 s after the end, and the same command goes on: every attempt has its result, and
every step is done once. After SIGSTOP and SIGCONT the run goes on as if nothing had happened.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cover import marks
from tests.launch.command import alive, children
from tests.sweep.jobs import Jobs, ended, send
from tests.until import until
from titanlab.distributed import free_port
from titanlab.records import list_runs

STEPS = 6
# Of a step: ranks look every second whether their launcher lives.
SECONDS = 0.8
# Ranks first finish a step and save, which takes longer where other work has the cores.
END_SECONDS, LEFT_SECONDS = 60.0, 20.0
TERM, KILL, STOP = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP
TWO_RANKS = ("rendezvous", "compile", "step", "save")


@dataclass
class Life:
    """A run and what has started it."""

    folder: Path
    start: object
    processes: list

    @property
    def run(self):
        (run,) = list_runs(self.folder / "runs")
        return run


def below(pid):
    """The processes that a process has started, and theirs."""
    return [each for child in children(pid) for each in (child, *below(child))]


@pytest.fixture
def life(command, tmp_path):
    """`life("torchrun", "save")`: started, and come to that point."""
    (tmp_path / "jobs").mkdir()
    jobs = Jobs(tmp_path / "jobs")
    started = []

    def begun(launcher, point):
        # A step of one rank is enough of what `titanlab train` has started: it is the row of `make test`.
        world = 2 if launcher != "local" or (point in TWO_RANKS and point != "step") else 1
        fault = ["data.fault=raise", "data.step=3", "data.attempt=1"] if point == "between restarts" else []
        if launcher == "job":
            run, folder = jobs.run(world, steps=STEPS, every=2, seconds=SECONDS), jobs.folder

            def start():
                return jobs.start(run, world)
        else:
            how = [
                f"training.steps={STEPS}",
                f"data.seconds={SECONDS}",
                "checkpoint.every=2",
                "launch.restarts=1",
                *fault,
            ]
            how += ["parallelism=ddp", "world=2"] if world == 2 and launcher == "local" else []
            folder = command.folder

            def start():
                if launcher == "local":
                    return [command.start(*how)]
                agent = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
                return [command.start("parallelism=ddp", *how, launcher=[*agent, "-m", "titanlab"])]

        environments = jobs.environment if launcher == "job" else command.environment
        environments["HOLD"] = point
        made = Life(folder, start, start())
        started.extend(made.processes)
        del environments["HOLD"]
        until(lambda: list(folder.glob("held-*")), 200)
        return made

    yield begun
    for process in started:
        for pid in [*below(process.pid), process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


PREEMPTED = {point: ["preempted", "done"] for point in TWO_RANKS}
# By launcher and signal: the ends of the attempts, by the point.
ENDS = {
    # Before ranks exist, nothing would be lost: the launcher dies of the signal.
    ("local", TERM): {
        "claim": ["done"],
        "begin": ["crash", "done"],
        **PREEMPTED,
        "conclude": ["done"],
        "between restarts": ["crash", "done"],
    },
    ("local", KILL): {
        "claim": ["done"],
        "begin": ["crash", "done"],
        **PREEMPTED,
        "conclude": ["done"],
        "between restarts": ["crash", "done"],
    },
    ("local", STOP): {
        **{key: ["done"] for key in ["claim", "begin", *TWO_RANKS, "conclude"]},
        "between restarts": ["crash", "done"],
    },
    ("torchrun", TERM): {**PREEMPTED, "conclude": ["done"]},
    ("torchrun", STOP): {"step": ["done"]},
    # A job's tasks hear the signal from their start on.
    ("job", TERM): {"claim": ["preempted", "done"], "begin": ["preempted", "done"], **PREEMPTED, "conclude": ["done"]},
    ("job", KILL): {"claim": ["done"], **PREEMPTED, "conclude": ["done"]},
    ("job", STOP): {"step": ["done"]},
}
# What ends an attempt before its ranks exist, and a local run at SIGINT: test_attempt.py and test_ranks.py, in less time.
QUICK, COVERING = [("local", KILL, "step")], [("job", TERM, "compile")]
CASES = [
    pytest.param(
        *case, ends, id=f"{case[0]}-{case[1].name}-{case[2]}", marks=marks(case, always=QUICK, covering=COVERING)
    )
    for (launcher, number), points in ENDS.items()
    for point, ends in points.items()
    for case in [(launcher, number, point)]
]


@pytest.mark.parametrize(("launcher", "number", "point", "ends"), CASES)
def test_a_run_that_is_ended_at_a_point_goes_on(life, launcher, number, point, ends):
    made = life(launcher, point)
    everyone = [pid for process in made.processes for pid in (process.pid, *below(process.pid))]
    send(made.processes, number)
    if number == STOP:
        time.sleep(2)
        send(made.processes, signal.SIGCONT)
    (made.folder / "go").touch()
    codes, said = ended(made.processes)
    if number == STOP:
        assert codes == [0] * len(codes), said
    else:
        launchers = [process.pid for process in made.processes]

        def is_over():
            has_result = made.run.result(made.run.newest_attempt() or None) is not None
            return not any(map(alive, launchers)) and (has_result or not any(map(alive, everyone)))

        until(is_over, END_SECONDS)
        until(lambda: not any(map(alive, everyone)), LEFT_SECONDS)
        again = made.start()
        codes, said = ended(again)
        assert codes == [0] * len(codes), said
    run = made.run
    assert [run.result(attempt).kind.value for attempt in run.attempts()] == ends, said
    if (number, ends[0]) == (KILL, "preempted"):
        assert run.result(1).cause.startswith("its launcher is gone; the run can be resumed")
    assert [row["step"] for row in run.metrics("train")] == list(range(1, STEPS + 1))

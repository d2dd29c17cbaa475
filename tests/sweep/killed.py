"""Kills processes that submit: `python -m tests.sweep.killed FOLDER slurm|local|nohup|force ROUNDS`, prints JSON of what is left.

Each round forks a process that submits, kills it at a random moment, and submits again, until as many as were asked for
have died of it. With `nohup`, the launcher is one of another package. With `force`, it is a sweep of Slurm's that is
done, and the killed process was to do it anew. It is a program of its own because a process that has threads, as
pytest's may, does not fork well.
"""

import functools
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.launch.third import install_third
from tests.sweep.fake_slurm.cluster import FakeSlurm
from tests.sweep.stub_package import stub_package
from tests.sweep.studies import SLURM, seeds, study
from titanlab.launch.launchers_schema import Local
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import folder_of, sweep_folder
from titanlab.sweep.submit import submit

POINTS = [*seeds(3), *seeds(2, shard=2), {"shard": 4}]


def in_a_child(wanted, *, force=False):
    child = os.fork()
    if child == 0:
        try:
            submit(wanted, lambda text: None, force=force)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def done(wanted, slurm):
    """Submit a study, and end all its jobs well."""
    assert os.waitpid(in_a_child(wanted), 0)[1] == 0
    for run in folder_of(wanted).runs():
        run.write_result(Outcome(kind=OutcomeKind.DONE, attempt=run.begin_attempt(run.config(), {})))
    for number in slurm.jobs():
        slurm.put(number, "COMPLETED")


def launch_of_another_package(folder):
    installed = str(install_third(folder))
    sys.path.insert(0, installed)
    os.environ["PYTHONPATH"] = installed
    return importlib.import_module("nohup_jobs.launch_schema").Nohup()


def main(folder, launcher, rounds):
    chance = random.Random(5)
    force = launcher == "force"
    if launcher in ("slurm", "force"):
        launch = SLURM
        slurm = FakeSlurm(folder / "slurm")
        slurm.set(before=0.05, after=0.05)
        os.environ.update(slurm.environment)
    else:
        launch = Local(at_once=8) if launcher == "local" else launch_of_another_package(folder)
        package = stub_package(folder / "stub", seconds=0.0)
        sweep_folder.take_snapshot = functools.partial(sweep_folder.take_snapshot, package=package)
    begun = time.monotonic()
    assert os.waitpid(in_a_child(study(folder / "whole", POINTS, launch=launch)), 0)[1] == 0
    whole = time.monotonic() - begun
    left: list[dict[str, object]] = []
    while sum(bool(each["killed"]) for each in left) < rounds and len(left) < 5 * rounds:
        number = len(left)
        wanted = study(folder / f"runs{number}", POINTS, launch=launch)
        if force:
            done(wanted, slurm)
        moment = chance.uniform(0, whole)
        child = in_a_child(wanted, force=force)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        was_killed = os.waitpid(child, 0)[1] != 0
        # The first submission was slower: it read what the later ones have in memory.
        whole = whole if was_killed else moment
        again = os.waitpid(in_a_child(wanted), 0)[1]
        left.append({"folder": str(folder / f"runs{number}" / "layouts"), "killed": was_killed, "again": again})
    print(json.dumps({"seconds": whole, "rounds": left, "runs": len(POINTS)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

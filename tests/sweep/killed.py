"""Kills processes that submit: `python -m tests.sweep.killed FOLDER slurm|local ROUNDS`, prints what is left as JSON.

Each round forks a process that submits, kills it at a random moment, and submits again, until as many as were asked for
have died of it. It is a program of its own because a process that has threads, as pytest's may, does not fork well.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.sweep.fake_slurm.cluster import FakeSlurm
from tests.sweep.stub_package import stub_package
from tests.sweep.studies import SLURM, seeds, study
from titanlab.launch.local_schema import Local
from titanlab.sweep import snapshot
from titanlab.sweep.submit import submit

POINTS = [*seeds(3), *seeds(2, shard=2), {"shard": 4}]


def in_a_child(wanted):
    child = os.fork()
    if child == 0:
        try:
            submit(wanted, lambda text: None)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def main(folder, launcher, rounds):
    chance = random.Random(5)
    launch = SLURM if launcher == "slurm" else Local(at_once=8)
    if launcher == "slurm":
        slurm = FakeSlurm(folder / "slurm")
        slurm.set(before=0.05, after=0.05)
        os.environ.update(slurm.environment)
    else:
        package = stub_package(folder / "stub", seconds=0.0)
        snapshot.take = functools.partial(snapshot.take, package=package)
    begun = time.monotonic()
    assert os.waitpid(in_a_child(study(folder / "whole", POINTS, launch=launch)), 0)[1] == 0
    whole = time.monotonic() - begun
    left: list[dict[str, object]] = []
    while sum(bool(each["killed"]) for each in left) < rounds and len(left) < 5 * rounds:
        number = len(left)
        wanted = study(folder / f"runs{number}", POINTS, launch=launch)
        moment = chance.uniform(0, whole)
        child = in_a_child(wanted)
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

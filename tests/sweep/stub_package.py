"""A copy of the package whose jobs train nothing: they hold their run, note that they ran, and write a result."""

import shutil
from pathlib import Path

import titanlab

_JOB = """
import os, signal, sys, time
from pathlib import Path
from titanlab.launch.launchers import launcher_named
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.sweep.sweep_folder import SweepFolder

# It waits until it is looked for, so that none comes between two lines.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
folder, token, index = SweepFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
(submission,) = [each for each in folder.submissions() if each.token == token]
run = folder.run(submission.runs[index])
launcher = launcher_named(submission.launcher)
place = launcher.place_in(os.environ)
rank, world = place.ranks.rank, place.ranks.world
kind = OutcomeKind.DONE
with (folder.path / "ran.txt").open("a") as file:
    words = [run.path.name, rank, world, os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES") or "none"]
    file.write(" ".join([*map(str, words), os.getcwd(), str(time.time())]) + "\\n")
if rank:
    signal.sigtimedwait({signal.SIGTERM}, SECONDS)
else:
    with run.claim():
        env = {"time": time.time(), "launcher": place.launcher, "code": {"fingerprint": "stub"}}
        attempt = run.begin_attempt(run.config(), env)
        if signal.sigtimedwait({signal.SIGTERM}, SECONDS):
            kind = OutcomeKind.CANCELLED if run.asked_to_cancel() else OutcomeKind.PREEMPTED
        run.write_result(Outcome(kind=kind, attempt=attempt, step=1))
"""


def stub_package(folder: Path, *, seconds: float = 0.1) -> Path:
    """The package's folder; its jobs take `seconds`, and note in ran.txt of their sweep what they were."""
    package = folder / "titanlab"
    shutil.copytree(Path(titanlab.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "launch" / "job" / "task.py").write_text(_JOB.replace("SECONDS", str(seconds)))
    return package

"""A package whose jobs train nothing: they hold their run, note that they ran, and write a result.

It has four files; its other modules are those of the package that runs. A copy of the whole package takes a snapshot
of 650 files for each test, which the first job then compiles.
"""

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
ENDS = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
folder, token, index = SweepFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
(submission,) = [each for each in folder.submissions() if each.token == token]
run = folder.run(submission.runs[index])
launcher = launcher_named(submission.launcher)
place = launcher.place_in(os.environ)
rank, world = place.ranks.rank, place.ranks.world
kind = OutcomeKind.DONE


def asked_to_end():
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not (folder.path / "end").exists():
        if signal.sigtimedwait(ENDS, 0.05):
            return True
    return bool(signal.sigtimedwait(ENDS, 0))


with (folder.path / "ran.txt").open("a") as file:
    words = [run.path.name, rank, world, os.environ.get("TITANLAB_CORES", "all"), os.environ.get("CUDA_VISIBLE_DEVICES") or "none"]
    file.write(" ".join([*map(str, words), os.getcwd(), str(time.time())]) + "\\n")
if rank:
    asked_to_end()
else:
    with run.claim():
        env = {"time": time.time(), "launcher": place.launcher, "code": {"fingerprint": "stub"}}
        attempt = run.begin_attempt(run.config(), env)
        if asked_to_end():
            kind = OutcomeKind.CANCELLED if run.asked_to_cancel() else OutcomeKind.PREEMPTED
        run.write_result(Outcome(kind=kind, attempt=attempt, step=1))
"""


def stub_package(folder: Path, *, seconds: float = 0.1) -> Path:
    """The package's folder; its jobs note in ran.txt of their sweep what they were.

    They take `seconds`, or end once the file `end` is in their sweep's folder.
    """
    package, whole = folder / "titanlab", Path(titanlab.__file__).parent
    (package / "launch").mkdir(parents=True)
    for name in (".", "launch"):
        source = (whole / name / "__init__.py").read_text()
        (package / name / "__init__.py").write_text(f"{source}\n__path__.append({str(whole / name)!r})\n")
        for door in (whole / name).glob("__init__.pyi"):
            shutil.copy(door, package / name)
    (package / "launch" / "task.py").write_text(_JOB.replace("SECONDS", str(seconds)))
    return package

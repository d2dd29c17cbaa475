"""sbatch, squeue, sacct, scancel, sinfo and scontrol for tests: jobs are files of a folder, and never run.

It is installed under each of these names. FAKE_SLURM names the folder:

    jobs/N.json       a job or an array: its batch file's flags, its elements' states
    partitions        lines of sinfo
    settings.json     delays of sbatch, in seconds, before and after the job is there; what it says instead
"""

import fcntl
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM"])
JOBS = FOLDER / "jobs"
NO_LONGER_WAITING = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def main(name, arguments):
    settings = json.loads((FOLDER / "settings.json").read_text())
    if settings.get("silent"):
        print(f"{name}: error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    return globals()[name](arguments, settings)


def sbatch(arguments, settings):
    time.sleep(settings.get("before", 0))
    if "refuses" in settings and not settings.get("keeps_refused"):
        print(f"sbatch: error: {settings['refuses']}", file=sys.stderr)
        return 1
    text = Path(arguments[-1]).read_text()
    flags = {}
    for line in re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE):
        flag, _, value = line.partition("=")
        flags[flag] = shlex.split(value)[0] if value else True
    count = 1 + int(re.fullmatch(r"0-(\d+)(?:%\d+)?", flags["array"])[1])
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = max([100, *(int(path.stem) for path in JOBS.glob("*.json"))]) + 1
        job = {"flags": flags, "script": text, "states": ["PENDING"] * count, "environment": dict(os.environ)}
        if "refuses" in settings:
            # As Slurm does with what no node can run: it shows it for some minutes, and accounts for nothing.
            job |= {"states": ["FAILED"] * count, "reason": "BadConstraints", "refused": True}
        write(number, job)
    if "refuses" in settings:
        print(f"sbatch: error: {settings['refuses']}", file=sys.stderr)
        return 1
    time.sleep(settings.get("after", 0))
    if settings.get("times_out"):
        print("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    print(f"Submitted batch job {number}")
    return 0


def squeue(arguments, settings):
    for number, job in chosen(arguments):
        if settings.get("forgets") and all(state in NO_LONGER_WAITING for state in job["states"]):
            continue
        waiting = "--array" not in arguments and all(state == "PENDING" for state in job["states"])
        for index, state in enumerate(job["states"][:1] if waiting else job["states"]):
            if state == "REMOVED":
                continue
            values = {"j": job["flags"]["job-name"], "F": number, "K": index, "A": number + index, "T": state}
            values |= {"r": job.get("reason", "None"), "M": "0:00", "N": ""}
            print(re.sub("%(.)", lambda match, values=values: str(values[match[1]]), option(arguments, "format")))
    return 0


def sacct(arguments, settings):
    if settings.get("accounts_nothing"):
        print("sacct: error: Slurm accounting storage is disabled", file=sys.stderr)
        return 1
    for number, job in chosen(arguments):
        if job.get("refused"):
            continue
        for index, state in enumerate(job["states"]):
            if state == "REMOVED":
                continue
            values = {"JobName": job["flags"]["job-name"], "JobID": f"{number}_{index}", "JobIDRaw": number + index}
            values |= {"State": state, "ExitCode": "0:0", "ElapsedRaw": 0, "NodeList": "", "Reason": "None"}
            print("|".join(str(values[name]) for name in option(arguments, "format").split(",")))
    return 0


def scancel(arguments, settings):
    with (FOLDER / "scancel.calls").open("a") as calls:
        print(*arguments, file=calls)
    signals = [text.partition("=")[2] for text in arguments if text.startswith("--signal=")]
    for text in arguments[len(signals) :]:
        number, _, places = text.partition("_")
        job = json.loads((JOBS / f"{number}.json").read_text())
        for part in places.strip("[]").split(",") if places else [f"0-{len(job['states']) - 1}"]:
            first, _, last = part.partition("-")
            for place in range(int(first), int(last or first) + 1):
                if signals:
                    job.setdefault("signals", []).append([place, *signals])
                elif job["states"][place] not in NO_LONGER_WAITING:
                    job["states"][place] = "CANCELLED"
        write(number, job)
    return 0


def scontrol(arguments, settings):
    if arguments != ["show", "config"] or "max_array" not in settings:
        return 1
    print("Configuration data as of 2026-11-22T01:01:12")
    print(f"MaxArraySize            = {settings['max_array']}\nSchedulerParameters     = {settings.get('parameters')}")
    return 0


def sinfo(arguments, settings):
    print((FOLDER / "partitions").read_text(), end="")
    return 0


def option(arguments, name):
    return next(text.partition("=")[2] for text in arguments if text.startswith(f"--{name}="))


def chosen(arguments):
    wanted = [text.partition("=")[2].split(",") for text in arguments if text.startswith("--jobs=")]
    for path in sorted(JOBS.glob("*.json"), key=lambda path: int(path.stem)):
        if not wanted or path.stem in wanted[0]:
            yield int(path.stem), json.loads(path.read_text())


def write(number, job):
    part = JOBS / f".{number}.{os.getpid()}"
    part.write_text(json.dumps(job))
    part.rename(JOBS / f"{number}.json")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))

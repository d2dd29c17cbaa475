import dataclasses
import errno
import os
import signal
from types import SimpleNamespace

import pytest

from tests.sweep.conftest import quiet
from tests.sweep.stub_package import stub_package
from tests.sweep.studies import seeds, study
from tests.until import until
from titanlab.distributed import cores
from titanlab.launch import JobShape, Submission, jobs_folder, write_submission
from titanlab.launch import local as supervising
from titanlab.launch.launchers_schema import Local
from titanlab.launch.local import LOCK, LOG, LocalJob, Supervisor, jobs_in_order
from titanlab.records import Outcome, OutcomeKind, holder_of, is_claimed
from titanlab.sweep import SweepFolder, sweep_folder
from titanlab.sweep.submit import submit


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Jobs of the code that is submitted train nothing; `stub(seconds)`: how long they take, unless a test ends them."""
    taken = sweep_folder.take_snapshot

    def of(seconds=180.0):
        package = stub_package(tmp_path / "stub", seconds=seconds)
        monkeypatch.setattr(sweep_folder, "take_snapshot", lambda code: taken(code, package=package))

    return of


def states(folder):
    return [job.state(folder.path).state for job in jobs_in_order(folder.path)]


def over(folder):
    return set(states(folder)) == {"ended"} and not is_claimed(folder.path, file=LOCK)


def end_jobs(folder):
    """Jobs that run end well, and later ones at once."""
    (folder.path / "end").touch()


def ran(folder):
    path = folder.path / "ran.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def supervisor_of(folder):
    return holder_of(folder.path, file=LOCK)[1]


def test_jobs_run_in_order_and_a_large_one_waits_for_room(stub, tmp_path, monkeypatch):
    stub(0.1)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    points = [*seeds(2), {"shard": 2}]
    submitted = submit(study(tmp_path / "runs", points, launch=Local(at_once=2)), quiet)
    assert [new.shape.processes for new in submitted.submissions] == [1, 2]
    until(lambda: over(submitted.folder))
    rows = ran(submitted.folder)
    names = [each.run for each in submitted.decisions]
    # One process for all ranks of a job.
    assert sorted(row[:3] for row in rows) == sorted([name, "0", "1"] for name in names)
    first = {row[0]: float(row[6]) for row in rows}
    # The two that fit together may start in either order; the larger one waits for them.
    assert max(first[names[0]], first[names[1]]) < first[names[2]]
    assert {row[5] for row in rows} == {str(tmp_path / "here")}
    # Cores are one share for every process that may run at once.
    assert {row[3] for row in rows} == {str(max(1, cores() // 2))}
    assert all(submitted.folder.run(name).result().kind is OutcomeKind.DONE for name in names)
    # Nothing is left to do, and the next submission starts nothing.
    assert submit(study(tmp_path / "runs", points, launch=Local(at_once=2)), quiet).submissions == ()
    assert not is_claimed(submitted.folder.path, file=LOCK)


def test_what_comes_later_is_run_by_the_same_supervisor(stub, tmp_path):
    stub()
    folder = submit(study(tmp_path / "runs", seeds(1)), quiet).folder
    until(lambda: ran(folder))
    first = supervisor_of(folder)
    submit(study(tmp_path / "runs", seeds(2)), quiet)
    end_jobs(folder)
    until(lambda: len(ran(folder)) == 2)
    assert supervisor_of(folder) == first
    until(lambda: over(folder))


def test_the_job_of_a_killed_supervisor_goes_on_and_the_next_one_waits_for_it(stub, tmp_path):
    stub()
    wanted = study(tmp_path / "runs", seeds(2), launch=Local(at_once=1))
    folder = submit(wanted, quiet).folder
    until(lambda: "running" in states(folder))
    os.kill(supervisor_of(folder), signal.SIGKILL)
    until(lambda: not is_claimed(folder.path, file=LOCK))
    found = submit(wanted, quiet)
    assert [each.action for each in found.decisions] == ["running", "queued"]
    assert found.submissions == ()
    log = jobs_folder(folder.path) / LOG
    until(lambda: "was started by an earlier supervisor" in log.read_text())
    end_jobs(folder)
    until(lambda: over(folder))
    first, second = (row[0] for row in ran(folder))
    said = log.read_text()
    assert first != second
    assert said.index(f"{first} has ended") < said.index(f"{second} is started")
    assert all(run.result().kind is OutcomeKind.DONE for run in folder.runs())


def test_a_supervisor_that_is_told_to_end_asks_its_jobs_to(stub, tmp_path):
    stub()
    folder = submit(study(tmp_path / "runs", seeds(2), launch=Local(at_once=1)), quiet).folder
    until(lambda: "running" in states(folder))
    os.kill(supervisor_of(folder), signal.SIGTERM)
    # The run that waits is for the next supervisor.
    until(lambda: not is_claimed(folder.path, file=LOCK))
    assert [run.result().kind for run in folder.runs() if run.result()] == [OutcomeKind.PREEMPTED]
    assert states(folder) == ["ended", "pending"]


# Without processes


def planned(folder, sizes, *, at_once=None, gpus=False, here="/"):
    """Jobs of a folder in which submissions of these sizes wait."""
    (folder.path / "submissions").mkdir(parents=True)
    (folder.path / "jobs").mkdir()
    jobs = []
    for place, size in enumerate(sizes):
        shape = JobShape(processes=size, tasks_per_node=size, gpus_per_node=size if gpus else 0)
        launch = dataclasses.asdict(Local(at_once=at_once))
        each = Submission(
            token=f"t{place}", launcher="local", state="submitted", code="code/x", shape=shape, launch=launch,
            runs=(f"run-{place:08x}",), created=float(place), folder=str(here),
        )  # fmt: skip
        write_submission(folder.path, each)
        jobs.append(LocalJob(submission=each, index=0))
        (folder.path / jobs[-1].run).mkdir()
    return jobs


def supervised(folder, *, devices=()):
    supervisor = Supervisor(folder.path, devices=list(devices))
    supervisor._read_submissions()
    return supervisor


def run_to_the_end(folder, monkeypatch):
    """What a supervisor makes of the jobs of a folder, in this process."""
    monkeypatch.setattr(supervising, "_POLL_SECONDS", 0.02)
    with supervising.contextlib.ExitStack() as lock:
        supervised(folder).run(lock)
    return [folder.run(job.run).result() for job in jobs_in_order(folder.path)]


def test_a_job_that_cannot_be_started_has_failed_and_the_others_are_tried(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path / "sweep")
    planned(folder, [1, 1])
    monkeypatch.setattr(supervising.sys, "executable", str(tmp_path / "deleted"))
    for result in run_to_the_end(folder, monkeypatch):
        assert (result.kind, result.attempt) == (OutcomeKind.CRASH, 0)
        assert result.cause.startswith("could not be started: FileNotFoundError: [Errno 2] No such file or directory")


def test_a_job_that_ends_before_its_run_begins_has_failed_with_what_it_has_printed(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path / "sweep")
    _, second = planned(folder, [1, 1])
    commands = {"t0": "raise ImportError('no x')", "t1": "raise SystemExit(3)"}
    monkeypatch.setattr(Submission, "command", lambda self, sweep, index: ["-c", commands[self.token]])
    earlier = Outcome(kind=OutcomeKind.HANG, attempt=1, step=3, steps=10, ended=-60.0, metrics={"loss": 2.5})
    folder.run(second.run).write_result(earlier)
    results = run_to_the_end(folder, monkeypatch)
    assert [result.cause for result in results] == [
        "ended before the run began: ImportError: no x",
        "ended with exit code 3 before the run began",
    ]
    # The run has got no further, and has lost nothing.
    assert (results[1].step, results[1].steps, results[1].metrics) == (3, 10, {"loss": 2.5})


SHOW = """
import os
print(os.getcwd(), *map(os.environ.get, ("MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TITANLAB_CORES")))
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_runs_in_the_folder_of_its_submission_with_devices_of_its_own(tmp_path, monkeypatch, is_there):
    folder, here = SweepFolder(tmp_path / "sweep"), tmp_path / "it's; a $HOME `folder`"
    if is_there:
        here.mkdir()
    (job,) = planned(folder, [2], at_once=2, here=here)
    monkeypatch.setattr(Submission, "command", lambda self, sweep, index: ["-c", SHOW])
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    supervisor = supervised(folder)
    job.devices = ("2", "GPU-3")
    assert supervisor._started(job).wait() == 0
    said = (folder.path / "jobs" / "t0_0_0_log.out").read_text()
    assert said == f"{here if is_there else os.getcwd()} None 2,GPU-3 {max(1, cores() // 2)}\n"


def test_a_full_disk_is_no_fault_of_the_job(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path / "sweep")
    (job,) = planned(folder, [1])
    supervisor = supervised(folder)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor, "_started", full)
    with pytest.raises(OSError, match="No space left"):
        supervisor._start(job)
    assert (supervisor._waiting, folder.run(job.run).result()) == ([job], None)


@pytest.mark.parametrize(
    ("running", "size", "fits"),
    [([], 1, True), ([2], 2, True), ([2, 1], 2, False), ([], 9, True), ([1], 9, False), ([9], 1, False)],
)
def test_processes_at_once_are_limited_and_a_larger_job_runs_alone(tmp_path, running, size, fits):
    folder = SweepFolder(tmp_path / "sweep")
    *others, job = planned(folder, [*running, size], at_once=4)
    supervisor = Supervisor(folder.path, devices=[])
    for each in others:
        supervisor._running[each.key] = each
    assert supervisor._has_room(job) is fits


def test_jobs_have_devices_of_their_own(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    first, second, third = planned(folder, [2, 1, 2], at_once=8, gpus=True)
    supervisor = Supervisor(folder.path, devices=["0", "1", "GPU-abc", "3"])
    first.process, first.devices = SimpleNamespace(), ("0", "1")
    supervisor._running[first.key] = first
    # An earlier supervisor has started the other one.
    supervisor._running[second.key] = second
    folder.run(second.run).begin_attempt({}, {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-abc"}})
    assert supervisor._free_devices() == ["3"]
    assert not supervisor._has_room(third)
    del supervisor._running[first.key]
    assert supervisor._free_devices()[:2] == ["0", "1"]
    assert supervisor._has_room(third)

import contextlib
import dataclasses
import errno
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sweep.conftest import quiet
from tests.sweep.stub_package import stub_package
from tests.sweep.studies import seeds, study
from tests.until import until
from titanlab.distributed.host import Host, cores
from titanlab.launch.local.queue import LOCK, LOG, LocalJob, has_work, local_job, wake, write_local_job
from titanlab.launch.local.supervisor import Supervisor, _Job, _RunningJob, visible_devices
from titanlab.launch.local_schema import Local
from titanlab.launch.submission import JobShape, Submission, jobs_folder, write_submission
from titanlab.records.claim import is_claimed
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep import snapshot
from titanlab.sweep.enqueue import cancel
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.submit import submit
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.processes import born_at


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Jobs of the code that is submitted train nothing; `stub(seconds)`: how long they take, unless a test ends them."""
    taken = snapshot.take

    def of(seconds=180.0):
        package = stub_package(tmp_path / "stub", seconds=seconds)
        monkeypatch.setattr(snapshot, "take", lambda code: taken(code, package=package))

    return of


def over(folder):
    return not has_work(folder.path) and not is_claimed(folder.path, file=LOCK)


def end_jobs(folder):
    """Jobs that run end well, and later ones at once."""
    (folder.path / "end").touch()


def ran(folder):
    path = folder.path / "ran.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def supervisor_of(folder):
    return int((folder.path / LOCK).read_text().split()[1])


def test_jobs_run_in_order_and_all_ranks_of_each(stub, tmp_path, monkeypatch):
    stub(0.1)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    points = [*seeds(2), {"shard": 2}]
    submitted = submit(study(tmp_path / "runs", points, launch=Local(at_once=2)), quiet)
    assert [shape.processes for _, shape, _ in submitted.jobs] == [1, 2]
    until(lambda: over(submitted.folder))
    rows = ran(submitted.folder)
    names = [each.run_name for each in submitted.decisions]
    assert sorted((row[0], int(row[1]), int(row[2])) for row in rows) == sorted(
        (name, rank, world) for name, world in zip(names, (1, 1, 2), strict=True) for rank in range(world)
    )
    first = {name: min(float(row[6]) for row in rows if row[0] == name) for name in names}
    # The two that fit together may start in either order; the larger one waits for them.
    assert max(first[names[0]], first[names[1]]) < first[names[2]]
    assert {row[5] for row in rows} == {str(tmp_path / "here")}
    # Cores are one share for every process that may run at once.
    assert {row[3] for row in rows} == {str(max(1, cores() // 2))}
    assert all(submitted.folder.run(name).result().kind is OutcomeKind.DONE for name in names)
    # Nothing is left to do, and the next submission starts nothing.
    assert submit(study(tmp_path / "runs", points, launch=Local(at_once=2)), quiet).jobs == ()
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
    until(lambda: ran(folder))
    os.kill(supervisor_of(folder), signal.SIGKILL)
    until(lambda: not is_claimed(folder.path, file=LOCK))
    found = submit(wanted, quiet)
    assert [each.action for each in found.decisions] == ["running", "queued"]
    assert found.jobs == ()
    log = jobs_folder(folder.path) / LOG
    until(lambda: "was started by an earlier supervisor" in log.read_text())
    end_jobs(folder)
    until(lambda: over(folder))
    first, second = (row[0] for row in ran(folder))
    said = log.read_text()
    assert first != second
    assert said.index(f"{first} has ended") < said.index(f"{second} is started")
    assert all(run.result().kind is OutcomeKind.DONE for run in folder.runs())


def test_cancelled_jobs_end_or_do_not_start(stub, tmp_path):
    stub()
    wanted = study(tmp_path / "runs", seeds(3), launch=Local(at_once=1))
    submitted = submit(wanted, quiet)
    folder = submitted.folder
    until(lambda: ran(folder))
    first, second, third = (each.run_name for each in submitted.decisions)
    done = cancel(folder, quiet, names=[third])
    assert (done.stopping, done.withdrawn) == ([], [third])
    assert folder.run(third).result().kind is OutcomeKind.CANCELLED
    done = cancel(folder, quiet)
    assert (done.stopping, done.withdrawn, done.ended) == ([first], [second], [third])
    until(lambda: over(folder))
    assert {row[0] for row in ran(folder)} == {first}
    assert [folder.run(name).result().kind for name in (first, second)] == ["cancelled", "cancelled"]
    assert [each.action for each in submit(wanted, quiet).decisions] == ["ended"] * 3


def test_a_supervisor_that_is_told_to_end_asks_its_jobs_to(stub, tmp_path):
    stub()
    folder = submit(study(tmp_path / "runs", seeds(2), launch=Local(at_once=1)), quiet).folder
    until(lambda: ran(folder))
    os.kill(supervisor_of(folder), signal.SIGTERM)
    # The run that waits is for the next supervisor.
    until(lambda: not is_claimed(folder.path, file=LOCK))
    assert [run.result().kind for run in folder.runs() if run.result()] == [OutcomeKind.PREEMPTED]
    assert has_work(folder.path)


def test_where_another_run_meets_is_not_handed_on(stub, tmp_path, monkeypatch):
    stub()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    folder = submit(study(tmp_path / "runs", seeds(1), launch=Local()), quiet).folder
    until(lambda: ran(folder))
    (submission,) = folder.submissions()
    pids = [supervisor_of(folder), local_job(folder.path, submission.token, 0).pid]
    said = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
    assert not [text for each in said for text in each if text.startswith(b"MASTER_")]
    end_jobs(folder)
    until(lambda: over(folder))


# Without processes


def planned(folder, sizes, *, at_once=None, gpus=False):
    """Supervisor and jobs of a folder in which submissions of these sizes wait."""
    (folder.path / "submissions").mkdir(parents=True)
    jobs = []
    for place, size in enumerate(sizes):
        shape = JobShape(processes=size, tasks_per_node=size, gpus_per_node=size if gpus else 0)
        launch = dataclasses.asdict(Local(at_once=at_once))
        each = Submission(
            token=f"t{place}", launcher="local", state="submitted", code="code/x", shape=shape, launch=launch,
            runs=(f"run-{place:08x}",), created=float(place),
        )  # fmt: skip
        write_submission(folder.path, each)
        jobs.append(_Job(submission=each, index=0))
    return jobs


def begun(folder, jobs):
    """The supervisor of these jobs after it has read them; their runs have folders."""
    for job in jobs:
        (folder.path / job.run).mkdir()
    supervisor = Supervisor(folder.path, devices=[])
    supervisor._read_submissions()
    return supervisor


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ModuleNotFoundError("No module named 'submitit'"), "ModuleNotFoundError: No module named 'submitit'"),
        (FileNotFoundError(2, "No such file or directory", "python"), "FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_a_job_that_cannot_be_started_has_ended_and_the_others_are_tried(tmp_path, monkeypatch, error, cause):
    folder = SweepFolder(tmp_path / "sweep")
    jobs = planned(folder, [1, 1])
    tried = []

    def start(sweep, submission, *given, **more):
        tried.append(submission.token)
        raise error

    monkeypatch.setattr("titanlab.launch.local.supervisor.start", start)
    with contextlib.ExitStack() as lock:
        begun(folder, jobs).run(lock)
    assert tried == ["t0", "t1"]
    for job in jobs:
        record = local_job(folder.path, *job.key)
        assert record.state == "ended"
        assert record.cause.startswith(f"could not be started: {cause}")


def test_a_full_disk_is_no_fault_of_the_job(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path / "sweep")
    (job,) = planned(folder, [1])
    supervisor = begun(folder, [job])
    waits = []

    def start(*given, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("titanlab.launch.local.supervisor.start", start)
    monkeypatch.setattr("titanlab.launch.local.supervisor.time.sleep", waits.append)
    supervisor._start(job)
    assert supervisor._waiting == [job]
    assert (local_job(folder.path, *job.key).state, waits) == ("starting", [5.0])


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (1, "its controller ended with exit code 1; supervisor.log ends with: ImportError: no x"),
        # The first ends with 0 whatever its ranks end with; somebody has killed the second.
        (0, None),
        (-9, None),
    ],
)
def test_a_controller_that_failed_is_the_cause(tmp_path, code, cause):
    folder = SweepFolder(tmp_path / "sweep")
    (job,) = planned(folder, [1])
    supervisor = begun(folder, [job])
    (folder.path / "jobs").mkdir()
    (folder.path / "jobs" / LOG).write_text("ImportError: no x\n2026-11-26 09:20:40  t0 is started\n")
    ended = SimpleNamespace(poll=lambda: code, returncode=code)
    supervisor._running[job.key] = _RunningJob(job=job, record=LocalJob(state="running"), process=ended)
    supervisor._collect()
    assert (local_job(folder.path, *job.key).state, local_job(folder.path, *job.key).cause) == ("ended", cause)


@pytest.mark.parametrize(
    ("running", "size", "fits"),
    [([], 1, True), ([2], 2, True), ([2, 1], 2, False), ([], 9, True), ([1], 9, False), ([9], 1, False)],
)
def test_processes_at_once_are_limited_and_a_larger_job_runs_alone(tmp_path, running, size, fits):
    folder = SweepFolder(tmp_path / "sweep")
    *others, job = planned(folder, [*running, size], at_once=4)
    supervisor = Supervisor(folder.path, devices=[])
    for each in others:
        supervisor._running[each.key] = _RunningJob(job=each, record=LocalJob(state="running"), process=None)
    assert supervisor._has_room(job) is fits


def test_jobs_have_devices_of_their_own(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    first, second, third = planned(folder, [2, 1, 2], at_once=8, gpus=True)
    supervisor = Supervisor(folder.path, devices=["0", "1", "GPU-abc", "3"])
    for each, devices in ((first, ("0", "1")), (second, ("GPU-abc",))):
        supervisor._running[each.key] = _RunningJob(
            job=each, record=LocalJob(state="running"), process=None, devices=devices
        )
    assert supervisor._free_devices() == ["3"]
    assert not supervisor._has_room(third)
    del supervisor._running[first.key]
    assert supervisor._free_devices()[:2] == ["0", "1"]
    assert supervisor._has_room(third)


def test_devices_are_those_that_this_process_sees(monkeypatch):
    seen = Host(accelerator="cuda", device="NVIDIA H200", count=2)
    monkeypatch.setattr("titanlab.launch.local.supervisor.this_host", lambda: seen)
    assert visible_devices({}) == ["0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3,GPU-abc"}) == ["3", "GPU-abc"]
    monkeypatch.setattr(
        "titanlab.launch.local.supervisor.this_host", lambda: Host(accelerator="cpu", device="cpu", count=4)
    )
    assert visible_devices({}) == []


def test_a_number_that_another_process_has_now_is_not_the_job(tmp_path):
    write_local_job(tmp_path, "t", 0, LocalJob(state="running", pid=os.getpid(), born=1))
    assert not local_job(tmp_path, "t", 0).is_alive(RunFolder(tmp_path / "run"))
    assert local_job(tmp_path, "t", 1) is None


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A job that another host's supervisor has started, and its run: `elsewhere(started)`; nothing here is killed."""

    def killed(pid, number):
        pytest.fail(f"{pid} is another host's process")

    def noted(started):
        monkeypatch.setattr("titanlab.launch.local.launcher.wake", lambda sweep: None)
        submitted = submit(study(tmp_path / "runs", seeds(1)), quiet)
        folder, name = submitted.folder, submitted.decisions[0].run_name
        token = submitted.folder.submissions()[0].token
        record = LocalJob(state="running", host="other", pid=os.getpid(), born=born_at(os.getpid()), started=started)
        write_local_job(folder.path, token, 0, record)
        monkeypatch.setattr(os, "kill", killed)
        return folder, folder.run(name), token

    return noted


def test_a_job_of_another_host_that_nobody_hears_of_has_ended(elsewhere):
    folder, run, token = elsewhere(1.0)
    assert cancel(folder, quiet).ended == [run.path.name]
    assert run.result().kind is OutcomeKind.CRASH
    supervisor = Supervisor(folder.path, devices=[])
    supervisor._read_submissions()
    supervisor._collect()
    assert local_job(folder.path, token, 0).state == "ended"
    assert not has_work(folder.path)


def test_a_job_that_lives_on_another_host_is_cancelled_there(elsewhere):
    folder, run, token = elsewhere(time.time())
    lines = []
    assert cancel(folder, lines.append).stopping == [run.path.name]
    assert lines == [f"{run.path.name} runs on other: cancel it there"]
    supervisor = Supervisor(folder.path, devices=[])
    supervisor._read_submissions()
    supervisor.end(signal.SIGTERM, None)
    supervisor._collect()
    assert local_job(folder.path, token, 0).state == "running"
    # Its host dies after it was asked.
    write_local_job(folder.path, token, 0, dataclasses.replace(local_job(folder.path, token, 0), started=1.0))
    reconcile(folder)
    assert run.result().kind is OutcomeKind.CANCELLED


def test_there_is_nothing_to_wake_where_nothing_waits(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    (job,) = planned(folder, [1])
    write_local_job(folder.path, *job.key, LocalJob(state="ended"))
    assert not wake(folder.path)

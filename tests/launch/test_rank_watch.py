"""What is said of a worker that could not say why it ended, and when a job is put back into its queue."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from tests.sweep.jobs import Jobs
from titanlab.distributed import ALONE
from titanlab.launch import evidence as memory_kills
from titanlab.launch import watch as rank_watch
from titanlab.launch.contract import ProcessPlace, StopReason
from titanlab.launch.evidence import MemoryKills
from titanlab.launch.group import requeue_after
from titanlab.launch.job import Job
from titanlab.launch.slurm.launcher import SlurmLauncher
from titanlab.launch.watch import RankWatch, settle, write_stop
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status, from_exception


class Worker:
    """One that has written something into its log, and ends with a code when it is looked at or killed."""

    # The number of no process.
    pid = 2**22 + 1

    def __init__(self, code, said="", *, looks=0):
        self.code, self.text, self.looks = code, said, looks
        self.told, self.killed, self.shown = [], False, False

    def poll(self):
        self.looks -= 1
        return (-9 if self.killed else self.code) if self.killed or self.looks < 0 else None

    def ask_to_stop(self, kind, cause):
        self.told.append((kind, cause))

    def show_stacks(self):
        self.shown = True

    def kill(self):
        self.killed = True
        return -9

    def output(self):
        return self.text


@pytest.fixture
def run(tmp_path):
    made = Jobs(tmp_path).run(1, launcher="slurm")
    made.begin_attempt(made.config(), {})
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("GRACE_SECONDS", "HANG_GRACE_SECONDS", "VISIBLE_SECONDS"):
        monkeypatch.setattr(rank_watch, name, 0.2)
    monkeypatch.setattr(rank_watch, "_POLL_SECONDS", 0.02)


def watched(run, worker, **given):
    RankWatch(run, 1, worker, rank=0, world=given.pop("world", 1), check_signals=lambda: None, **given).to_end()
    return next((note for note in run.failures(1) if note.rank == 0), None)


@pytest.mark.parametrize(
    ("code", "said", "kind", "cause"),
    [
        (-9, "", "crash", "killed by SIGKILL"),
        (0, "", "crash", "ended with exit code 0 and left no result"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n", "oom", "terminate called"),
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n", "oom", "OpenBLAS error"),
        (-11, "Fatal Python error: Segmentation fault\n", "crash", "segmentation fault"),
        (
            1,
            "noise\nTimeout (0:10:15)!\nThread 0x1 (most recent call first):\n  File x\n",
            "hang",
            "a step did not end",
        ),
        (7, "last words\n", "crash", "ended with exit code 7"),
    ],
)
def test_a_worker_without_a_note(run, code, said, kind, cause):
    note = watched(run, Worker(code, said))
    assert (note.kind.value, note.rank, note.attempt) == (kind, 0, 1)
    assert note.cause.startswith(cause)
    assert (note.traceback is not None) == bool(said)
    if kind == "hang":
        assert note.traceback.startswith("Timeout (")
        assert note.exit_code == 71


def test_a_worker_that_the_kernel_killed_is_out_of_memory(run, monkeypatch):
    counts = iter([MemoryKills("its control group", 2), MemoryKills("its control group", 3)])
    for module in (rank_watch, memory_kills):
        monkeypatch.setattr(module, "memory_kills", lambda root=None: next(counts))
    note = watched(run, Worker(-9, "the last line of a log\n"))
    assert (note.kind, note.rank, note.exit_code, note.traceback) == (OutcomeKind.OOM, 0, -9, None)
    assert note.cause == "killed by SIGKILL: the kernel has killed a process of its control group for want of memory"


def test_a_limit_of_addresses_explains_threads_that_do_not_start(run, monkeypatch):
    said = "libgomp: Thread creation failed: Resource temporarily unavailable\n"
    assert watched(run, Worker(1, said)).kind is OutcomeKind.CRASH
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**31, 2**31))
    (run.attempt_folder(1) / "failures" / "rank-0.json").unlink()
    assert watched(run, Worker(1, said)).kind is OutcomeKind.OOM


def test_one_that_has_said_why_is_not_contradicted(run):
    run.write_failure(from_exception(MemoryError("no more"), rank=0))
    assert watched(run, Worker(1)).cause == "MemoryError: no more"


def test_when_another_rank_has_failed_it_is_ended_without_a_note(run):
    run.write_failure(from_exception(LookupError("x"), rank=1))
    worker = Worker(0, looks=10_000)
    assert watched(run, worker, world=2) is None
    assert (worker.killed, worker.shown) == (True, False)


def test_when_another_rank_hangs_it_shows_where_it_stands_first(run):
    run.write_failure(Outcome(kind=OutcomeKind.HANG, rank=1, ended=time.time() + 60))
    worker = Worker(0, looks=10_000)
    note = watched(run, worker, world=2)
    assert (worker.killed, worker.shown) == (True, True)
    # It has noted nothing itself: that it does not answer is what is known.
    assert (note.kind, note.rank, note.echo, note.traceback) == (OutcomeKind.HANG, 0, False, None)
    assert note.cause == "a step did not end in time: rank 0 does not answer: nothing is known of its process"


def test_a_wish_is_passed_on_once(run):
    wish = write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.WALLTIME, cause="why"))
    run.write_status(Status(state="running", attempt=1))
    worker = Worker(-9, looks=5)
    note = watched(run, worker)
    assert worker.told == [(wish.kind, "why")]
    assert (note.kind, note.cause, note.echo) == (OutcomeKind.WALLTIME, "why; it ended before it could save", False)


@pytest.mark.parametrize("hurried", [False, True])
def test_one_that_has_nothing_to_save_is_ended_at_once(run, hurried):
    write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.CANCELLED, cause="why"))
    run.write_status(Status(state="running" if hurried else "starting", attempt=1))
    worker = Worker(0, looks=10_000)
    assert watched(run, worker, is_hurried=lambda: hurried).kind is OutcomeKind.CANCELLED
    assert worker.killed


def test_nobody_waits_for_ranks_that_have_all_spoken(run, monkeypatch):
    monkeypatch.setattr(rank_watch, "SETTLE_SECONDS", 3600.0)
    for rank in range(2):
        run.write_failure(from_exception(ConnectionError("Connection closed by peer"), rank=rank))
    begin = time.monotonic()
    settle(run, 1, 2)
    # Nor for a third one, once somebody has told a reason.
    run.write_failure(from_exception(LookupError("x"), rank=1))
    settle(run, 1, 3)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("kind", "launch", "restart", "has_saved", "asked"),
    [
        (OutcomeKind.PREEMPTED, {}, 0, False, True),
        (OutcomeKind.WALLTIME, {}, 0, True, True),
        (OutcomeKind.WALLTIME, {}, 0, False, False),
        (OutcomeKind.PREEMPTED, {"requeue": False}, 0, True, False),
        (OutcomeKind.PREEMPTED, {"max_requeues": 2}, 2, True, False),
        (OutcomeKind.CANCELLED, {}, 0, True, False),
        (OutcomeKind.DONE, {}, 0, True, False),
        (OutcomeKind.HANG, {}, 0, True, False),
    ],
)
def test_what_is_put_back_into_the_queue(run, monkeypatch, kind, launch, restart, has_saved, asked):
    place = ProcessPlace(
        launcher="slurm", job_id="12_0", raw_job_id="12", restart=restart, index=0, ranks=ALONE, nodes=("n1",)
    )
    called = []
    monkeypatch.setattr(SlurmLauncher, "requeue", lambda self, place: called.append(place.raw_job_id))
    launch = {"requeue": True, "max_requeues": 20, **launch}
    job = Job(run=run, place=place, token="aa", index=0, launch=launch)
    requeue_after(job, Outcome(kind=kind), has_saved=has_saved)
    assert called == (["12"] if asked else [])


def test_only_a_person_is_in_a_hurry(run):
    local = ProcessPlace(
        launcher="local", job_id="1", raw_job_id="1", restart=0, index=None, ranks=ALONE, nodes=("n1",)
    )
    twice = [(int(signal.SIGTERM), 10.0), (int(signal.SIGTERM), 15.0)]
    assert Job(run=run, place=local, token="aa", index=0, signals=twice).is_hurried
    assert not Job(run=run, place=local, token="aa", index=0, signals=twice[:1]).is_hurried
    at_once = [(int(signal.SIGTERM), 10.0), (int(signal.SIGINT), 10.1)]
    assert not Job(run=run, place=local, token="aa", index=0, signals=at_once).is_hurried


@pytest.mark.parametrize(
    ("world", "is_first", "most"), [(2, True, 500), (2, False, 125), (512, True, 46), (512, False, 12)]
)
def test_ranks_of_a_large_job_look_seldom_and_with_one_call(run, monkeypatch, world, is_first, most):
    """In 100 s; 512 ranks on 64 nodes make 28 + 50 calls a second, where they made 685."""
    now, calls = [1.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=lambda s: now.__setitem__(0, now[0] + 0.2))
    monkeypatch.setattr(rank_watch, "time", clock)
    listdir, read = os.listdir, RunFolder.result
    monkeypatch.setattr(rank_watch.os, "listdir", lambda path: (calls.append("list"), listdir(path))[1])
    monkeypatch.setattr(rank_watch, "read_stop", lambda folder: calls.append("stop"))
    monkeypatch.setattr(RunFolder, "failures", lambda self, attempt: calls.append("failures") or [])
    monkeypatch.setattr(RunFolder, "result", lambda self, attempt: calls.append("result") or read(self, attempt))
    worker = Worker(0, looks=500)
    watch = RankWatch(run, 1, worker, rank=0, world=world, check_signals=lambda: None, is_first=is_first)
    monkeypatch.setattr(watch, "_note", lambda code: calls.append("end"))
    assert watch.to_end() == 0
    assert 0.8 * most <= calls.count("list") <= most + 1
    # The file of a stop is read once more when the worker has ended.
    assert [call for call in calls if call != "list"] == ["stop", "end"]

"""The watch of one rank of a job: what it tells the worker, what it notes of one that could not say why it ended.

The worker is a script of a shell.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.launch.command import alive
from tests.launch.slurm.printed import submission
from tests.sweep.jobs import Jobs
from tests.until import until
from titanlab.distributed import ALONE, LOG, hang, read_stop, write_stop
from titanlab.launch import RankProcesses, evidence, launcher_named, processes, watch
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.evidence import MemoryKills
from titanlab.launch.job import Job
from titanlab.launch.processes import start_worker
from titanlab.launch.slurm import launcher as slurm_launcher
from titanlab.launch.watch import RankWatch, StopCheck, ignore_stop_signals, meaning, settle
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status, StopReason, from_exception

FOREVER = "exec sleep 600"
# Says what it has heard, and ends.
HEARS = (
    "import signal, sys, time; signal.signal(signal.SIGHUP, lambda *_: sys.exit(4)); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP]); time.sleep(600)"
)


def place(launcher="slurm", **given):
    given = {"index": 0, "ranks": ALONE, **given}
    return ProcessPlace(launcher=launcher, job_id="12_0", raw_job_id="12", nodes=("n1",), **given)


@pytest.fixture
def run(tmp_path):
    made = Jobs(tmp_path).run(1, launcher="slurm")
    made.begin_attempt(made.config(), {})
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("GRACE_SECONDS", "HANG_GRACE_SECONDS", "VISIBLE_SECONDS"):
        monkeypatch.setattr(watch, name, 0.2)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.02)


@pytest.fixture
def watched(run, monkeypatch, tmp_path):
    """`watched("exit 3")`: the note of a rank whose worker runs that script, or None."""
    monkeypatch.setenv("OUT", str(tmp_path))

    def to_end(script, *, world=1, signals=(), is_deaf=False):
        def set_up():
            ignore_stop_signals()
            if is_deaf:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        monkeypatch.setattr(processes, "worker_command", lambda folder: ["sh", "-c", script])
        ranks = replace(ALONE, world=world, started_by="slurm")
        job = SimpleNamespace(run=run, leads=False, signals=[], is_hurried=bool(signals))
        log = {LOG: str(run.logs / "rank-0.log")}
        started = start_worker(run.path, ranks, 1, config={"a": [1]}, variables=log, set_up=set_up)
        RankWatch(run, 1, RankProcesses({0: started}), ranks, StopCheck(job, signal_seconds=30)).to_end()
        return next((note for note in run.failures(1) if note.rank == 0), None)

    return to_end


def test_where_ranks_hang_one_of_this_host_that_has_ended_is_not_awaited(run, monkeypatch):
    monkeypatch.setattr(hang, "ANSWER_SECONDS", 300.0)
    run.write_failure(Outcome(kind=OutcomeKind.HANG, step=3, rank=1, attempt=1, cause="it waits", echo=True))
    ranks = [subprocess.Popen(words) for words in (["true"], ["sleep", "600"])]
    os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
    begin = time.monotonic()
    failed = processes.wait_for(RankProcesses(dict(enumerate(ranks))), run, since=0.0, world=2)
    assert time.monotonic() - begin < 60
    assert failed == {0: 0, 1: -signal.SIGKILL}


def test_a_worker_has_its_recipe_its_place_and_no_signals_of_the_scheduler(run, watched, tmp_path):
    names = ("RANK", "WORLD_SIZE", "TITANLAB_ATTEMPT", "TITANLAB_PARENT", "TITANLAB_LOG")
    words = " ".join(f'"${name}"' for name in names)
    watched(f'cat > "$OUT/given"; printf "%s\\n" {words} > "$OUT/said"; grep SigIgn /proc/self/status > "$OUT/ignored"')
    assert (tmp_path / "given").read_text() == '{"a": [1]}\n'
    said = (tmp_path / "said").read_text().split()
    assert said == ["0", "1", "1", str(os.getpid()), str(run.logs / "rank-0.log")]
    mask = int((tmp_path / "ignored").read_text().split()[1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGXCPU):
        assert mask >> (number - 1) & 1
    assert not mask >> (signal.SIGHUP - 1) & 1


@pytest.mark.parametrize(
    ("script", "said", "kind", "cause"),
    [
        ("kill -9 $$", "", "crash", "killed by SIGKILL"),
        ("exit 0", "", "crash", "ended with exit code 0 and left no result"),
        ("kill -6 $$", "terminate called after throwing an instance of 'std::bad_alloc'", "oom", "terminate called"),
        ("exit 1", "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", "oom", "OpenBLAS err"),
        ("kill -11 $$", "Fatal Python error: Segmentation fault", "crash", "segmentation fault"),
        ("exit 1", "noise\nTimeout (0:10:15)!\nThread 0x1 (most recent call first):\n  File x", "hang", "a step did not end"),
        ("exit 7", "last words", "crash", "ended with exit code 7"),
    ],
)  # fmt: skip
def test_a_worker_without_a_note(run, watched, script, said, kind, cause):
    (run.logs / "rank-0.log").write_text("")
    note = watched(f"""{f'echo "{said}" >> "$TITANLAB_LOG"; ' if said else ""}{script}""")
    assert (note.kind.value, note.rank, note.attempt) == (kind, 0, 1)
    assert note.cause.startswith(cause)
    assert (note.traceback is not None) == bool(said)
    if kind == "hang":
        assert note.traceback.startswith("Timeout (")
        assert note.exit_code == 71


def test_a_worker_that_the_kernel_killed_is_out_of_memory(watched, monkeypatch):
    counts = iter([MemoryKills("its control group", 2), MemoryKills("its control group", 3)])
    for module in (watch, evidence):
        monkeypatch.setattr(module, "memory_kills", lambda root=None: next(counts))
    note = watched('echo "the last line of a log" >> "$TITANLAB_LOG"; kill -9 $$')
    assert (note.kind, note.rank, note.exit_code, note.traceback) == (OutcomeKind.OOM, 0, -9, None)
    assert note.cause == "killed by SIGKILL: the kernel has killed a process of its control group for want of memory"


def test_a_limit_of_addresses_explains_threads_that_do_not_start(run, watched, monkeypatch):
    script = 'echo "libgomp: Thread creation failed: Resource temporarily unavailable" >> "$TITANLAB_LOG"; exit 1'
    assert watched(script).kind is OutcomeKind.CRASH
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**31, 2**31))
    (run.attempt_folder(1) / "failures" / "rank-0.json").unlink()
    assert watched(script).kind is OutcomeKind.OOM


def test_one_that_has_said_why_is_not_contradicted(run, watched):
    run.write_failure(from_exception(MemoryError("no more"), rank=0))
    assert watched("exit 1").cause == "MemoryError: no more"


def test_when_another_rank_has_failed_it_is_ended_with_what_it_has_started_and_without_a_note(run, watched, tmp_path):
    run.write_failure(from_exception(LookupError("x"), rank=1))
    assert watched('sleep 600 & echo $! > "$OUT/other"; wait', world=2) is None
    until(lambda: not alive(int((tmp_path / "other").read_text())))


def test_when_another_rank_hangs_a_worker_that_does_not_answer_is_told_of(run, watched):
    run.write_failure(Outcome(kind=OutcomeKind.HANG, rank=1, ended=time.time() + 60))
    # A worker that is stopped is not woken.
    note = watched("kill -STOP $$", world=2, is_deaf=True)
    # It has noted nothing itself: that it does not answer is what is known.
    assert (note.kind, note.rank, note.echo, note.traceback) == (OutcomeKind.HANG, 0, False, None)
    assert note.cause == "a step did not end in time: rank 0 does not answer: its process is stopped (SIGSTOP)"


def test_a_reason_to_stop_is_passed_on(run, watched):
    write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.WALLTIME, cause="why"))
    run.write_status(Status(state="running", attempt=1))
    assert (
        watched(f"exec {sys.executable} -c '{HEARS}'").cause
        == "ended with exit code 4 and left no result; its log says more"
    )
    (run.attempt_folder(1) / "failures" / "rank-0.json").unlink()
    note = watched("sleep 0.5; kill -9 $$")
    assert (note.kind, note.cause, note.echo) == (OutcomeKind.WALLTIME, "why; it ended before it could save", False)


def test_a_rank_that_somebody_else_has_waited_for_counts_as_ended_well():
    process = subprocess.Popen(["sh", "-c", "exit 5"])
    process.wait()
    assert RankProcesses({0: process.pid}).codes == {0: 0}


@pytest.mark.parametrize("hurried", [False, True])
def test_one_that_has_nothing_to_save_is_ended_at_once(run, watched, hurried):
    write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.CANCELLED, cause="why"))
    run.write_status(Status(state="running" if hurried else "starting", attempt=1))
    assert watched(FOREVER, signals=[(2, 0.0)] if hurried else []).kind is OutcomeKind.CANCELLED


def test_nobody_waits_for_ranks_that_have_all_spoken(run, monkeypatch):
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 3600.0)
    for rank in range(2):
        run.write_failure(from_exception(ConnectionError("Connection closed by peer"), rank=rank))
    begin = time.monotonic()
    settle(run, 1, 2)
    # Nor for a third one, once somebody has told a reason.
    run.write_failure(from_exception(LookupError("x"), rank=1))
    settle(run, 1, 3)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(("world", "local_rank", "most"), [(2, 0, 500), (2, 1, 125), (512, 0, 46), (512, 1, 12)])
def test_ranks_of_a_large_job_look_seldom_and_with_one_call(run, monkeypatch, world, local_rank, most):
    """In 100 s; 512 ranks on 64 nodes make 28 + 50 calls a second, where they made 685."""
    now, calls = [1.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + 0.05))
    monkeypatch.setattr(processes, "time", clock)
    listdir, read = os.listdir, RunFolder.result
    monkeypatch.setattr(watch.os, "listdir", lambda path: (calls.append("list"), listdir(path))[1])
    monkeypatch.setattr(watch, "read_stop", lambda folder: calls.append("stop"))
    monkeypatch.setattr(RunFolder, "failures", lambda self, attempt: calls.append("failures") or [])
    monkeypatch.setattr(RunFolder, "result", lambda self, attempt: calls.append("result") or read(self, attempt))
    started = RankProcesses({0: os.getpid()})
    monkeypatch.setattr(started, "running", lambda: started.pids if now[0] < 101 else {})
    monkeypatch.setattr(RankProcesses, "codes", {0: 0})
    stop = SimpleNamespace(look=lambda folder: None, job=SimpleNamespace(is_hurried=False))
    watching = RankWatch(run, 1, started, replace(ALONE, world=world, local_rank=local_rank), stop)
    monkeypatch.setattr(watching, "_escalation", SimpleNamespace(unsent=[], is_due=lambda pids: False))
    monkeypatch.setattr(watching, "_note", lambda code, memory: calls.append("end"))
    assert watching.to_end() == 0
    assert 0.8 * most <= calls.count("list") <= most + 1
    # The file of a stop is read once more when the worker has ended.
    assert [call for call in calls if call != "list"] == ["stop", "end"]


# What a signal to a job means, by what `scontrol show job` of Slurm 22.05 said when it came


NOW = 1_795_309_272  # 2026-11-22T01:01:12
RUNNING = "JobState=RUNNING Reason=None Restarts=0 EndTime=2026-11-22T01:05:50 PreemptTime=None"
# The grace time of a preemption: the end comes near, too.
GRACE = "JobState=SIGNALING Reason=None Restarts=0 EndTime=2026-11-22T01:01:27 PreemptTime=2026-11-22T01:01:12"
PUT_BACK = "JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown"
CANCELLED = "JobState=COMPLETING Reason=None Restarts=0 EndTime=2026-11-22T01:01:12 PreemptTime=None"
LIMIT = "JobState=COMPLETING Reason=TimeLimit Restarts=0 EndTime=2026-11-22T01:01:12 PreemptTime=None"
LOST = "JobState=COMPLETING Reason=NodeDown Restarts=0 EndTime=2026-11-22T01:01:12 PreemptTime=None"
NEAR_LIMIT = "JobState=RUNNING Reason=None Restarts=0 EndTime=2026-11-22T01:02:07 PreemptTime=None"


@pytest.mark.parametrize(
    ("launcher", "facts", "number", "by", "kind"),
    [
        ("slurm", GRACE, signal.SIGTERM, None, "preempted"),
        ("slurm", GRACE, signal.SIGUSR2, None, "preempted"),
        ("slurm", PUT_BACK, signal.SIGTERM, None, "preempted"),
        ("slurm", CANCELLED, signal.SIGTERM, None, "cancelled"),
        ("slurm", LIMIT, signal.SIGTERM, None, "walltime"),
        # In the scheduler's word afterwards: node_fail.
        ("slurm", LOST, signal.SIGTERM, None, "preempted"),
        # Asked for 30 s before, and warned 55 s before.
        ("slurm", NEAR_LIMIT, signal.SIGUSR2, None, "walltime"),
        ("slurm", RUNNING, signal.SIGUSR2, None, "preempted"),
        ("slurm", RUNNING, signal.SIGTERM, None, "cancelled"),
        ("slurm", "", signal.SIGTERM, None, "preempted"),
        ("slurm", "", signal.SIGUSR2, None, "preempted"),
        ("local", "", signal.SIGINT, None, "cancelled"),
        ("local", "", signal.SIGTERM, None, "preempted"),
        ("local", "", signal.SIGTERM, "titanlab cancel on n1", "cancelled"),
        ("local", "", signal.SIGXCPU, None, "walltime"),
    ],
)
def test_what_a_signal_means(monkeypatch, launcher, facts, number, by, kind):
    monkeypatch.setattr(slurm_launcher, "_job_facts", lambda job: dict(word.split("=", 1) for word in facts.split()))
    monkeypatch.setattr(time, "time", lambda: NOW)
    found = meaning(number, launcher_named(launcher), place(launcher), signal_seconds=30, cancelled_by=by)
    assert found.kind.value == kind
    assert by is not None or signal.Signals(number).name in found.cause
    assert launcher == "local" or "12_0" in found.cause


def test_slurm_is_asked_about_this_job_and_no_other_of_its_array(monkeypatch):
    asked = []

    def run(words, **_):
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, GRACE.encode(), b"")

    monkeypatch.setattr(subprocess, "run", run)
    meaning(signal.SIGUSR2, launcher_named("slurm"), place(), signal_seconds=30, cancelled_by=None)
    launcher_named("slurm").requeue(place())
    # The number that the last one has for itself is the whole array's, too.
    assert [words[-1] for words in asked] == ["12_0"] * 3


def test_ranks_save_before_a_slow_scheduler_has_said_why(run, monkeypatch):
    """The answer comes when they have ended, and the run's result has it."""
    answers = threading.Event()

    def reason(self, name, place, *, signal_seconds):
        assert answers.wait(60)
        return StopReason(kind=OutcomeKind.WALLTIME, cause="9 s are left")

    monkeypatch.setattr(slurm_launcher.SlurmLauncher, "stop_reason", reason)
    monkeypatch.setattr(watch, "ASK_SECONDS", 0.05)
    attempt = run.attempt_folder(1)
    signals = [(int(signal.SIGUSR2), time.monotonic())]
    check = StopCheck(Job(run=run, place=place(), submission=submission(), index=0, signals=signals), signal_seconds=30)
    begin = time.monotonic()
    check.look(attempt)
    assert time.monotonic() - begin < 20
    told = read_stop(attempt)
    assert told.kind is OutcomeKind.PREEMPTED
    assert told.cause == "job 12_0 was sent SIGUSR2, and the scheduler does not say why"
    ended = Outcome(kind=OutcomeKind.PREEMPTED, attempt=1, cause=f"{told.cause} (while it compiled)", exit_code=75)
    # Where it never answers, the assumption stands.
    monkeypatch.setattr(watch, "LATE_SECONDS", 0.05)
    assert check.corrected(ended) == ended
    monkeypatch.setattr(watch, "LATE_SECONDS", 60.0)
    answers.set()
    late = check.corrected(ended)
    assert (late.kind, late.cause, late.exit_code) == (OutcomeKind.WALLTIME, "9 s are left (while it compiled)", 76)
    # An end of another cause stays.
    crash = Outcome(kind=OutcomeKind.CRASH, attempt=1, cause="LookupError: x")
    assert check.corrected(crash) == crash

"""What a signal to a job means, by what `scontrol show job` of Slurm 22.05 said when it came."""

import calendar
import signal
import subprocess
import threading
import time

import pytest

from tests.sweep.jobs import Jobs
from titanlab.distributed import ALONE
from titanlab.launch import launcher_named, read_stop
from titanlab.launch import watch as stop_file
from titanlab.launch.contract import ProcessPlace, StopReason
from titanlab.launch.job import Job
from titanlab.launch.slurm import launcher as slurm_launcher
from titanlab.launch.watch import StopCheck, meaning, write_stop
from titanlab.records import Outcome, OutcomeKind

NOW = calendar.timegm(time.strptime("2026-11-22T01:01:12", "%Y-%m-%dT%H:%M:%S"))
RUNNING = (
    "JobState=RUNNING Reason=None Restarts=0 StartTime=2026-11-22T01:00:50 EndTime=2026-11-22T01:05:50 PreemptTime=None"
)
# The grace time of a preemption: the end comes near, too.
GRACE = "JobState=SIGNALING Reason=None Restarts=0 EndTime=2026-11-22T01:01:27 PreemptTime=2026-11-22T01:01:12 SuspendTime=None"
PUT_BACK = "JobState=COMPLETING Reason=None Restarts=1 StartTime=Unknown EndTime=Unknown SuspendTime=None"
CANCELLED = "JobState=COMPLETING Reason=None Restarts=0 ExitCode=0:15 EndTime=2026-11-22T01:01:12 PreemptTime=None"
LIMIT = "JobState=COMPLETING Reason=TimeLimit Restarts=0 ExitCode=0:15 EndTime=2026-11-22T01:01:12 PreemptTime=None"
LOST = "JobState=COMPLETING Reason=NodeDown Restarts=0 EndTime=2026-11-22T01:01:12 PreemptTime=None"
NEAR_LIMIT = "JobState=RUNNING Reason=None Restarts=0 EndTime=2026-11-22T01:02:07 PreemptTime=None"


def place(launcher="slurm"):
    return ProcessPlace(
        launcher=launcher, job_id="12_0", raw_job_id="12", restart=0, index=0, ranks=ALONE, nodes=("n1",)
    )


@pytest.mark.parametrize(
    ("facts", "number", "kind"),
    [
        (GRACE, signal.SIGTERM, "preempted"),
        (GRACE, signal.SIGUSR2, "preempted"),
        (PUT_BACK, signal.SIGTERM, "preempted"),
        (CANCELLED, signal.SIGTERM, "cancelled"),
        (LIMIT, signal.SIGTERM, "walltime"),
        # In the scheduler's word afterwards: node_fail.
        (LOST, signal.SIGTERM, "preempted"),
        # Asked for 30 s before, and warned 55 s before.
        (NEAR_LIMIT, signal.SIGUSR2, "walltime"),
        (RUNNING, signal.SIGUSR2, "preempted"),
        (RUNNING, signal.SIGTERM, "cancelled"),
        ("", signal.SIGTERM, "preempted"),
        ("", signal.SIGUSR2, "preempted"),
    ],
)
def test_slurms_signals(monkeypatch, facts, number, kind):
    monkeypatch.setattr(slurm_launcher, "_job_facts", lambda job: dict(word.split("=", 1) for word in facts.split()))
    monkeypatch.setattr(time, "time", lambda: NOW)
    found = meaning(number, launcher_named("slurm"), place(), signal_seconds=30, cancelled_by=None)
    assert found.kind.value == kind
    assert signal.Signals(number).name in found.cause
    assert "12_0" in found.cause


@pytest.mark.parametrize(
    ("number", "by", "kind"),
    [
        (signal.SIGINT, None, "cancelled"),
        (signal.SIGTERM, None, "preempted"),
        (signal.SIGTERM, "titanlab cancel on n1", "cancelled"),
        (signal.SIGXCPU, None, "walltime"),
    ],
)
def test_signals_on_this_host(number, by, kind):
    assert (
        meaning(number, launcher_named("local"), place("local"), signal_seconds=0, cancelled_by=by).kind.value == kind
    )


def test_the_first_word_stands(tmp_path):
    first = StopReason(kind=OutcomeKind.PREEMPTED, cause="one")
    assert read_stop(tmp_path) is None
    assert write_stop(tmp_path, first) == first
    assert write_stop(tmp_path, StopReason(kind=OutcomeKind.CANCELLED, cause="two")) == first
    assert read_stop(tmp_path) == first
    (tmp_path / "stop.json").write_text('{"kind": "pre')
    assert read_stop(tmp_path) is None


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


def test_ranks_save_before_a_slow_scheduler_has_said_why(tmp_path, monkeypatch):
    """The answer comes when they have ended, and the run's result has it."""
    answers = threading.Event()

    def reason(self, name, place, *, signal_seconds):
        assert answers.wait(60)
        return StopReason(kind=OutcomeKind.WALLTIME, cause="9 s are left")

    monkeypatch.setattr(slurm_launcher.SlurmLauncher, "stop_reason", reason)
    monkeypatch.setattr(stop_file, "ASK_SECONDS", 0.05)
    run = Jobs(tmp_path).run(1, launcher="slurm")
    attempt = run.attempt_folder(run.begin_attempt(run.config(), {}))
    signals = [(int(signal.SIGUSR2), time.monotonic())]
    check = StopCheck(Job(run=run, place=place(), token="aa", index=0, signals=signals), signal_seconds=30)
    begin = time.monotonic()
    check.look(attempt)
    assert time.monotonic() - begin < 20
    told = read_stop(attempt)
    assert told.kind is OutcomeKind.PREEMPTED
    assert told.cause == "job 12_0 was sent SIGUSR2, and the scheduler does not say why"
    ended = Outcome(
        kind=OutcomeKind.PREEMPTED, attempt=1, step=3, cause=f"{told.cause} (while it compiled)", exit_code=75
    )
    # Where it never answers, the assumption stands.
    monkeypatch.setattr(stop_file, "LATE_SECONDS", 0.05)
    assert check.corrected(ended) == ended
    monkeypatch.setattr(stop_file, "LATE_SECONDS", 60.0)
    answers.set()
    late = check.corrected(ended)
    assert (late.kind, late.cause, late.exit_code) == (OutcomeKind.WALLTIME, "9 s are left (while it compiled)", 76)
    # An end of another cause stays.
    crash = Outcome(kind=OutcomeKind.CRASH, attempt=1, cause="LookupError: x")
    assert check.corrected(crash) == crash

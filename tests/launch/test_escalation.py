"""Ranks that a stop request does not end, and ranks that are stopped (SIGSTOP)."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.until import until
from titanlab.launch.processes import HURRY_SECONDS, START_SECONDS, STOP_SECONDS, STOPPED_SECONDS, Escalation
from titanlab.records import OutcomeKind, RunFolder, Status
from titanlab.system import process_state

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells the state of a process")


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "a-12345678")
    for folder in ("attempts", "logs"):
        (run.path / folder).mkdir(parents=True)
    run.begin_attempt({"training": {"step_timeout_seconds": None}}, None)
    return run


@pytest.fixture
def process():
    """A process that is no rank, and does nothing."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(run, clock):
    """An escalation, and the lines that it says."""
    lines = []

    def make(world=2):
        return Escalation(run, attempt=1, world=world, say=lines.append, clock=clock), lines

    return make


def reached(run, step, state="running"):
    run.write_status(Status(state=state, step=step, steps=100, attempt=1))


def timeless(line):
    return re.sub(r"\d\d:\d\d:\d\d", "TIME", line)


def goes_on(process):
    return f"`kill -CONT {process.pid}` on {socket.gethostname()} lets it go on"


def test_before_the_first_step_ranks_have_a_short_time(watch, run, clock, process):
    escalation, lines = watch()
    escalation.signalled(signal.SIGTERM)
    assert not escalation.is_due({0: process.pid, 1: process.pid})
    clock.now += START_SECONDS - 1
    assert not escalation.is_due({0: process.pid, 1: process.pid})
    clock.now += 1
    assert escalation.is_due({0: process.pid, 1: process.pid})
    (note,) = run.failures(1)
    assert (note.kind, note.rank, note.echo) == (OutcomeKind.PREEMPTED, 0, False)
    assert note.cause == "asked to end by SIGTERM; its ranks did not end within 10 s, so all ranks were killed"
    # Nobody has pressed Ctrl-C.
    assert lines == []


def test_a_step_or_a_save_begins_the_time_anew(watch, run, clock, process):
    escalation, _ = watch()
    reached(run, 3)
    escalation.signalled(signal.SIGTERM)
    for step, state in ((3, "running"), (4, "running"), (4, "saving")):
        reached(run, step, state)
        clock.now += STOP_SECONDS - 1
        assert not escalation.is_due({0: process.pid})
    clock.now += STOP_SECONDS
    assert escalation.is_due({0: process.pid})
    (note,) = run.failures(1)
    assert note.cause.startswith("asked to end by SIGTERM; its ranks did not end within 600 s")
    assert note.cause.endswith("; 4 steps are lost")


def test_a_second_request_does_not_wait(watch, run, clock, process):
    escalation, _ = watch()
    reached(run, 7)
    run.note_saved(1, 6)
    escalation.signalled(signal.SIGINT)
    clock.now += 0.5
    # A terminal and a launcher may both send it.
    escalation.signalled(signal.SIGINT)
    clock.now += HURRY_SECONDS + 1
    assert not escalation.is_due({0: process.pid})
    escalation.signalled(signal.SIGINT)
    clock.now += HURRY_SECONDS - 1
    assert not escalation.is_due({0: process.pid})
    clock.now += 1
    assert escalation.is_due({0: process.pid})
    (note,) = run.failures(1)
    assert (note.kind, note.step) == (OutcomeKind.CANCELLED, 7)
    assert note.cause == (
        "asked to end by SIGINT; asked again, so all ranks were killed; 1 step since the checkpoint of step 6 is lost"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_is_answered_at_once(watch, run, process, number):
    escalation, lines = watch()
    reached(run, 8)
    run.note_saved(1, 5)
    escalation.signalled(number)
    for _ in range(2):
        assert not escalation.is_due({0: process.pid})
    line = "stopping after this step, then saving. A second Ctrl-C ends the run now"
    assert lines == [f"{line}; 3 steps since the checkpoint of step 5 are lost"]


@on_linux
@pytest.mark.parametrize(("timeout", "limit"), [(None, 60), (7.5, 7.5), (0, None)])
def test_a_stopped_rank_is_said_within_seconds_and_hangs_after_the_time_of_a_step(
    watch, run, clock, process, timeout, limit
):
    (run.attempt_folder(1) / "config.yaml").write_text(f"training: {{step_timeout_seconds: {timeout or 'null'}}}\n")
    if timeout == 0:
        (run.attempt_folder(1) / "config.yaml").write_text("training: {step_timeout_seconds: 0}\n")
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: process_state(process.pid) == "T")
    escalation, lines = watch()
    pids = {0: os.getpid(), 1: process.pid}
    for _ in range(3):
        assert not escalation.is_due(pids)
        clock.now += STOPPED_SECONDS
    assert [timeless(line) for line in lines] == [
        f"rank 1: its process is stopped (SIGSTOP) since TIME, and the others wait for it: {goes_on(process)}"
    ]
    # `status` and `diagnose` show the same.
    assert run.stopped(1) == lines[0]
    assert not escalation.hangs
    clock.now += 3600 if limit is None else limit
    assert not escalation.is_due(pids)
    assert escalation.hangs == (limit is not None)
    assert [note.cause for note in run.failures(1)] == (
        []
        if limit is None
        else [f"a rank was stopped for {limit:g} s: rank 1 does not answer: its process is stopped (SIGSTOP)"]
    )


@on_linux
def test_a_rank_that_goes_on_in_time_is_forgotten(watch, run, clock, process):
    escalation, lines = watch()
    for _ in range(2):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: process_state(process.pid) == "T")
        clock.now += 1
        assert not escalation.is_due({1: process.pid})
        clock.now += 50
        assert not escalation.is_due({1: process.pid})
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: process_state(process.pid) == "S")
        assert run.stopped(1) is not None
        clock.now += 1
        assert not escalation.is_due({1: process.pid})
        assert run.stopped(1) is None
    assert len(lines) == 2
    assert run.failures(1) == []


@on_linux
def test_a_rank_on_its_own_may_be_stopped_for_as_long_as_its_user_likes(watch, run, clock, process):
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: process_state(process.pid) == "T")
    escalation, lines = watch(world=1)
    for _ in range(3):
        assert not escalation.is_due({0: process.pid})
        clock.now += 10_000
    assert [timeless(line) for line in lines] == [
        f"rank 0: its process is stopped (SIGSTOP) since TIME: {goes_on(process)}"
    ]
    assert not escalation.hangs

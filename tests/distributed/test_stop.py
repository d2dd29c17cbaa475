"""A wish to stop."""

import os
import signal
import subprocess
import threading
import time

import pytest

from tests.until import until
from titanlab.distributed import (
    STOP_SIGNALS,
    STOPS,
    held_signals,
    read_stop,
    stop,
    stop_request,
    stopped_before_start,
    write_stop,
)
from titanlab.distributed.stop import Impatient
from titanlab.records import OutcomeKind, StopReason


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_one_that_is_no_echo_ends(number, monkeypatch):
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 300)
    before = signal.getsignal(number)
    with stop_request() as request:
        assert request.signal == 0
        os.kill(os.getpid(), number)
        assert request.signal == number
        os.kill(os.getpid(), number)
        monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def run():
        with stop_request() as request:
            seen.append(request.signal)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.mark.parametrize("kind", [OutcomeKind.CANCELLED, OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME])
def test_a_worker_of_a_job_is_told_by_a_file_and_sighup(tmp_path, kind):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_request(lambda: read_stop(tmp_path)) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (request.signal, request.cause) == (0, None)
            write_stop(tmp_path, StopReason(kind=kind, cause="why"))
            with pytest.raises(stop.StoppedEarly), request.at_once(active=True):
                os.kill(os.getpid(), signal.SIGHUP)
            assert (STOPS[request.signal], request.cause) == (kind, "why")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_first_reason_stands_and_half_a_file_is_none(tmp_path):
    first = StopReason(kind=OutcomeKind.PREEMPTED, cause="one")
    assert read_stop(tmp_path) is None
    assert write_stop(tmp_path, first) == first
    assert write_stop(tmp_path, StopReason(kind=OutcomeKind.CANCELLED, cause="two")) == first
    assert read_stop(tmp_path) == first
    (tmp_path / "stop.json").write_text('{"kind": "pre')
    assert read_stop(tmp_path) is None


@pytest.fixture
def _has_terminal():
    """SIGHUP is not ignored, as it is where these tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_has_terminal")
def test_a_closed_terminal_ends_a_run_as_ctrl_c_does_and_under_nohup_it_is_nothing():
    with stop_request() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert STOPS[request.signal] is OutcomeKind.CANCELLED
        assert request.cause == "its terminal was closed (SIGHUP); the run can be resumed"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_request() as request:
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.signal == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_the_end_of_the_launcher_is_named_also_when_linux_shows_it_late(monkeypatch, arrives):
    """The signal comes when a thread of the launcher ends, and until the last one has ended it is still the parent.

    Another rank may have the signal before this one.
    """
    monkeypatch.setenv("TITANLAB_PARENT", str(os.getppid()))
    with stop_request() as request:
        if arrives:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (request.signal, request.cause) == (signal.SIGTERM, None)
        assert request.cause_of(signal.SIGTERM) is None
        monkeypatch.setenv("TITANLAB_PARENT", str(os.getpid()))
        assert request.cause_of(signal.SIGTERM) == "its launcher is gone; the run can be resumed"
        assert request.cause_of(signal.SIGINT) is None
        if arrives:
            assert stop.stopped_early(request, rank=0, attempt=1).cause.startswith("its launcher is gone")
        # A cause that was told is kept.
        request.note(signal.SIGTERM, "preempted by another job")
        assert request.cause_of(signal.SIGTERM) == "preempted by another job"


def test_while_a_first_step_is_compiled_a_signal_ends_it_at_once():
    with stop_request() as request:
        with pytest.raises(stop.StoppedEarly), request.at_once(active=True):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(stop.StoppedEarly), request.at_once(active=True):
            raise AssertionError("the request was there before")
        early = stop.stopped_early(request, rank=1, attempt=2)
    assert (early.kind, early.rank, early.exit_code) == (OutcomeKind.PREEMPTED, 1, 75)
    assert early.cause == "asked to end by SIGTERM; the run can be resumed (before its first step was done)"


def test_a_rank_that_is_woken_again_while_it_ends_is_not_interrupted_again():
    """The launcher sends SIGCONT after each signal, and so does Linux for each thread of a launcher that dies."""
    is_clean = False
    with stop_request() as request, pytest.raises(stop.StoppedEarly), request.at_once(active=True):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGCONT)
            is_clean = True
    assert is_clean


def test_before_the_first_step_an_error_that_is_on_its_way_comes_first():
    with stop_request() as request:
        with pytest.raises(LookupError), request.at_once(active=True, patience_seconds=1.0):
            os.kill(os.getpid(), signal.SIGTERM)
            raise LookupError
        # The request waits, and nothing is raised outside the block.
        time.sleep(1.2)
        assert request.signal == signal.SIGTERM
        end = time.monotonic() + 120
        with pytest.raises(stop.StoppedEarly), request.at_once(active=True, patience_seconds=0.1):
            raise AssertionError("the request was there before")
    with stop_request() as request, pytest.raises(stop.StoppedEarly):
        with request.at_once(active=True, patience_seconds=0.1):
            os.kill(os.getpid(), signal.SIGTERM)
            while time.monotonic() < end:
                time.sleep(0.01)


def test_the_death_of_the_launcher_is_a_request_without_a_signal(monkeypatch):
    monkeypatch.setattr(stop, "_LAUNCHER_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("TITANLAB_PARENT", str(os.getppid()))
    with stop_request() as request:
        time.sleep(0.1)
        assert request.signal == 0
        monkeypatch.setenv("TITANLAB_PARENT", str(os.getpid()))
        until(lambda: request.signal)
        assert (request.signal, request.cause) == (signal.SIGTERM, "its launcher is gone; the run can be resumed")
        # The first signal after it is no second request.
        os.kill(os.getpid(), signal.SIGTERM)
    assert [thread for thread in threading.enumerate() if thread.name == "launcher"] == []


@pytest.mark.parametrize("patience", [0.0, 0.1])
def test_the_death_of_the_launcher_ends_a_wait_for_a_compiler_that_is_stopped(monkeypatch, patience):
    """The main thread waits in a system call, in which it would run no Python code for ever."""
    monkeypatch.setattr(stop, "_LAUNCHER_LOOK_SECONDS", 0.01)
    monkeypatch.setenv("TITANLAB_PARENT", str(os.getppid()))
    begin = time.monotonic()
    with stop_request() as request, pytest.raises(stop.StoppedEarly):
        with request.at_once(active=True, patience_seconds=patience):
            compiler = subprocess.Popen(["sleep", "300"])
            monkeypatch.setenv("TITANLAB_PARENT", str(os.getpid()))
            try:
                compiler.wait()
            finally:
                compiler.kill()
                compiler.wait()
    assert time.monotonic() - begin < 120
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL


@pytest.mark.usefixtures("_has_terminal")
def test_held_signals_are_noted_in_their_order_and_end_nothing(monkeypatch):
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 300)
    numbers = (signal.SIGHUP, *STOP_SIGNALS, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    with held_signals() as held:
        for number in numbers:
            os.kill(os.getpid(), number)
    assert [number for number, _ in held] == list(numbers)
    assert [when for _, when in held] == sorted(when for _, when in held)
    assert {number: signal.getsignal(number) for number in numbers} == before


def test_a_second_ctrl_c_ends_what_holds_signals(monkeypatch):
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 300)
    with pytest.raises(Impatient, match="interrupted again"), held_signals() as held:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)
        # A scheduler may repeat its signals.
        os.kill(os.getpid(), signal.SIGTERM)
        assert [number for number, _ in held] == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGHUP])
def test_a_signal_before_the_start_says_what_it_is(number):
    outcome = stopped_before_start(number, attempt=3)
    kind = OutcomeKind.CANCELLED if number == signal.SIGHUP else STOPS[number]
    assert (outcome.kind, outcome.exit_code, outcome.attempt, outcome.rank) == (kind, kind.exit_code, 3, None)
    said = "its terminal was closed (SIGHUP)" if number == signal.SIGHUP else f"asked to end by {number.name}"
    assert outcome.cause == f"{said}; the run can be resumed (before its ranks were started)"

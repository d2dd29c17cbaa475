"""The seconds of an attempt's start, by phase."""

import itertools
import math
import os
import sys
import time

import pytest

from titanlab.distributed import PARENT, StartUp, start_of_worker
from titanlab.system import process_start


def counted(*begun):
    """A start-up whose clock shows 10, 11, 12, …"""
    clock = itertools.count(10.0)
    return StartUp(dict(begun), clock=lambda: next(clock))


def test_seconds_add_up_to_the_time_from_the_launch_to_the_end():
    start_up = counted(("launcher", 3.0), ("python", 8.5))
    for phase in ("recipe", "imports", "recipe", "imports", "first_step"):
        start_up.begin(phase)
    seconds = start_up.end()
    assert seconds == {"launcher": 5.5, "python": 1.5, "recipe": 2.0, "imports": 2.0, "first_step": 1.0}
    assert list(seconds) == ["launcher", "python", "recipe", "imports", "first_step"]
    assert sum(seconds.values()) == 15.0 - 3.0


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (8.0, {"launcher": 0.5, "python": 2.5, "recipe": 1.0}),
        *((never, {"launcher": 5.5, "python": 2.5, "recipe": 1.0}) for never in (1.0, -(10**400), -math.inf, math.nan)),
        # By the clock of another host, or damaged: it has ended now.
        *((future, {"launcher": 0.0, "python": 1.0, "recipe": 1.0}) for future in (1e12, 10**400, math.inf)),
    ],
)
def test_earlier_attempts_of_the_launcher_do_not_count(ended, expected):
    start_up = counted(("launcher", 3.0), ("python", 8.5))
    start_up.begin_after(ended)
    start_up.begin("recipe")
    assert start_up.end() == expected
    # It ends once.
    start_up.begin("data")
    assert start_up.end() is None


def test_a_clock_that_is_set_back_gives_no_negative_seconds():
    clock = iter([10.0, 4.0, 5.0])
    start_up = StartUp(clock=lambda: next(clock))
    start_up.begin("model")
    start_up.begin("data")
    assert start_up.end() == {"model": 0.0, "data": 1.0}


def test_what_is_done_is_shown_until_the_recorder_takes_over():
    shown = []
    start_up = counted()
    start_up.begin("recipe", "not shown yet")
    start_up.show_by(shown.append)
    start_up.begin("imports", "importing torch")
    start_up.show_no_more()
    start_up.begin("first_step")
    assert shown == ["importing torch", None]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the start of a process is not known")
def test_a_worker_counts_from_the_start_of_its_launcher(monkeypatch):
    monkeypatch.setenv(PARENT, str(os.getpid()))
    start_up = start_of_worker()
    younger = time.time() - process_start(os.getpid())
    seconds = start_up.end()
    older = time.time() - process_start(os.getpid())
    assert list(seconds) == ["launcher", "python"]
    # Here the launcher is the worker.
    assert seconds["launcher"] == pytest.approx(0.0, abs=0.02)
    # ... and this process has lived as long as the second phase has lasted.
    assert 0 < younger - 0.02 <= seconds["python"] <= older + 0.02


def test_a_worker_that_nobody_has_launched_counts_from_its_own_start(monkeypatch):
    monkeypatch.delenv(PARENT, raising=False)
    assert list(start_of_worker().end()) == ["python"]

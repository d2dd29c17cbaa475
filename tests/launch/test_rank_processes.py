"""Processes of ranks: their exit codes, signals to them, and their end."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from tests.until import until
from titanlab.launch import RankProcesses


def watch(ranks, look=lambda: None):
    """Waits for ranks whose launcher nobody signals."""
    ranks.watch(SimpleNamespace(unsent=[], is_due=lambda pids: False), look, seconds=0.0)
    return ranks.codes


@pytest.fixture
def start():
    """`start("exit 3", "sleep 60")`: the processes of shells, by rank."""
    running = []

    def of(*scripts):
        started = {
            rank: subprocess.Popen(
                ["sh", "-c", script], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            for rank, script in enumerate(scripts)
        }
        running.extend(started.values())
        return started, RankProcesses({rank: each.pid for rank, each in started.items()}, started)

    yield of
    for each in running:
        if each.poll() is None:
            each.kill()
        each.wait()
        each.stdout.close()


def test_a_failure_ends_the_wait_and_ranks_that_ended_well_are_told_apart(start):
    started, ranks = start("exec sleep 60", "exit 0", "exit 3")
    assert {2: 3}.items() <= watch(ranks).items() <= {1: 0, 2: 3}.items()
    # Without this wait, the signal may come before rank 1 has ended.
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    until(lambda: 1 in ranks.codes or os.waitid(os.P_PID, started[1].pid, ended))
    ranks.end(signal.SIGKILL, seconds=0.0)
    assert ranks.codes == {0: -9, 1: 0, 2: 3}


def test_ranks_that_all_end_well_are_waited_for(start):
    started, ranks = start("exit 0", "exit 0")
    assert watch(ranks) == {0: 0, 1: 0}
    # Who has started them finds their codes too.
    assert [each.returncode for each in started.values()] == [0, 0]


def test_a_look_that_gives_no_more_time_ends_the_wait(start):
    _, ranks = start("exec sleep 60")
    looks = iter([None, 0.1, 600.0])
    assert watch(ranks, lambda: next(looks, None)) == {}


def test_without_ranks_there_is_nothing_to_wait_for():
    ranks = RankProcesses({})
    assert watch(ranks, lambda: 0.0) == {}
    ranks.ask_to_stop(signal.SIGTERM)
    ranks.end(signal.SIGTERM, seconds=60.0)
    assert ranks.codes == {}


def test_who_ignores_the_signal_is_killed_with_what_it_has_started(start):
    started, ranks = start("trap '' TERM; sleep 60 & echo $!; wait")
    child = int(started[0].stdout.readline())
    ranks.end(signal.SIGTERM, seconds=0.0)
    assert ranks.codes == {0: -9}

    def is_over():
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_over, pause_seconds=0.01)


def test_processes_that_others_have_reaped_count_as_ended_well(start):
    started, ranks = start("exit 5")
    started[0].wait()
    assert ranks.codes == {0: 0}


def test_codes_are_sorted_by_rank(start):
    _, ranks = start("exit 1", "exit 2", "exit 3")
    until(lambda: len(ranks.codes) == 3, pause_seconds=0.01)
    assert list(ranks.codes.items()) == [(0, 1), (1, 2), (2, 3)]

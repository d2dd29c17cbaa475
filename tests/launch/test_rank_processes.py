"""Processes of ranks: their exit codes, signals to them, and their end."""

import signal
import subprocess

import pytest

from tests.until import until
from titanlab.launch import RankProcesses


def never():
    return False


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
    _, ranks = start("exec sleep 60", "exit 0", "exit 3")
    failed, left = ranks.wait_for_failure(never, never)
    assert failed == {2}
    assert left <= {1}
    ranks.end(signal.SIGKILL, seconds=0.0)
    assert ranks.codes == {0: -9, 1: 0, 2: 3}


def test_ranks_that_all_end_well_are_waited_for(start):
    started, ranks = start("exit 0", "exit 0")
    assert ranks.wait_for_failure(never, never) == (set(), {0, 1})
    assert ranks.codes == {0: 0, 1: 0}
    # Who has started them finds their codes too.
    assert [each.returncode for each in started.values()] == [0, 0]


def test_a_hang_ends_the_wait(start, monkeypatch):
    monkeypatch.setattr("titanlab.launch.processes._HANG_LOOK_SECONDS", 0.0)
    _, ranks = start("exec sleep 60")
    looks = iter([False, True])
    assert ranks.wait_for_failure(lambda: next(looks), never) == (set(), set())
    assert ranks.codes == {}


def test_without_ranks_there_is_nothing_to_wait_for():
    ranks = RankProcesses({})
    assert ranks.wait_for_failure(lambda: True, never) == (set(), set())
    ranks.ask_to_stop(signal.SIGTERM)
    ranks.end(signal.SIGTERM, seconds=60.0)
    assert ranks.codes == {}


def test_a_signal_reaches_ranks_that_run(start):
    started, ranks = start("trap 'exit 7' USR1; echo ready; while :; do sleep 0.01; done", "exit 0")
    assert started[0].stdout.readline() == b"ready\n"
    until(lambda: 1 in ranks.codes, pause_seconds=0.01)
    ranks.show_stacks()
    until(lambda: 0 in ranks.codes, pause_seconds=0.01)
    assert ranks.codes == {0: 7, 1: 0}


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

"""Outcomes: every kind, how exceptions and exit codes are named, and which rank was the cause."""

import json
import pickle
import signal

import pytest

from tests.records.test_failure_signs import from_data
from titanlab.errors import ConfigError
from titanlab.records import KillEvidence, Outcome, OutcomeKind, first_cause, from_exception, from_exit, outcome

KINDS = "done oom hang nan crash preempted walltime node_fail cancelled infeasible data".split()


def test_the_taxonomy_is_whole():
    assert sorted(OutcomeKind) == sorted(KINDS)
    codes = {kind: kind.exit_code for kind in OutcomeKind}
    assert len(set(codes.values())) == len(KINDS)
    assert codes[OutcomeKind.DONE] == 0
    assert codes[OutcomeKind.INFEASIBLE] == ConfigError.exit_code == 2
    # 124 to 127 belong to timeout and the shell.
    assert all(0 <= code < 124 or code == 130 for code in codes.values())
    assert all(kind.meaning for kind in OutcomeKind)


def test_no_end_claims_a_scheduler_where_there_may_be_none():
    """SIGTERM ends a run of a laptop in the same words as a preempted job of a cluster."""
    assert OutcomeKind.PREEMPTED.meaning == "told to stop, by the scheduler or by SIGTERM"
    said = [from_exit(-number).cause for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)]
    assert not [cause for cause in said if "the scheduler" in cause]


def test_what_may_follow():
    automatic = {kind for kind in OutcomeKind if kind.automatic}
    # A hang would hang again: somebody has to look at it.
    assert automatic == {"node_fail", "preempted", "walltime"}
    assert automatic < {kind for kind in OutcomeKind if kind.may_continue}
    assert {kind for kind in OutcomeKind if not kind.may_continue} == {"done", "infeasible", "nan", "oom"}


def test_metrics_that_are_not_finite_are_null():
    mapping = Outcome(kind=OutcomeKind.NAN, metrics={"loss": float("nan")}).to_mapping()
    assert mapping["metrics"] == {"loss": None}


def test_the_exception_is_kept():
    def fail():
        raise RuntimeError("\n\n first line \nsecond line")

    with pytest.raises(RuntimeError) as caught:
        fail()
    found = from_exception(caught.value, step=4, rank=2, attempt=3)
    assert (found.step, found.rank, found.attempt, found.exit_code) == (4, 2, 3, 1)
    assert found.cause == "RuntimeError: first line"
    assert "in fail" in found.traceback
    assert "second line" in found.traceback


def test_a_persons_mistake_is_told_in_one_line_and_exits_with_2():
    error = ConfigError("data.path", "x.txt", "matches nothing", "try *.txt")
    found = from_exception(error)
    assert found.kind is OutcomeKind.DATA
    assert found.cause == "data.path=x.txt: matches nothing; try *.txt"
    assert found.traceback is None
    assert found.exit_code == 2
    assert outcome.exit_code(pickle.loads(pickle.dumps(error))) == 2
    assert outcome.exit_code(from_data(OSError("torn shard"))) == OutcomeKind.DATA.exit_code


def test_a_long_cause_is_cut():
    found = from_exception(RuntimeError("x" * 10_000))
    assert len(found.cause) == 500
    assert found.cause.endswith("...")


def test_a_message_that_utf_8_has_no_bytes_for_is_recorded(tmp_path):
    """Bytes of a file's name that are no text: the failure could not be written, and the cause was lost."""
    with pytest.raises(LookupError) as caught:
        raise LookupError("no file a\udc80b")
    found = from_exception(caught.value)
    assert found.cause == r"LookupError: no file a\udc80b"
    assert found.traceback.endswith("LookupError: no file a\\udc80b\n")
    (tmp_path / "result.json").write_text(json.dumps(found.to_mapping(), ensure_ascii=False), encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (0, "crash", "exit code 0"),
        (1, "crash", "exit code 1"),
        (17, "crash", "exit code 17"),
        (-signal.SIGKILL, "crash", "killed by SIGKILL; who sent it is not known"),
        (128 + signal.SIGKILL, "crash", "SIGKILL"),
        (-signal.SIGTERM, "cancelled", "SIGTERM"),
        (130, "cancelled", "Ctrl-C"),
        (-signal.SIGINT, "cancelled", "Ctrl-C"),
        (-signal.SIGUSR2, "preempted", "SIGUSR2"),
        (-signal.SIGXCPU, "walltime", "SIGXCPU"),
        (-signal.SIGSEGV, "crash", "segmentation"),
        (-signal.SIGABRT, "crash", "SIGABRT"),
        (-signal.SIGBUS, "crash", "/dev/shm"),
        (-signal.SIGQUIT, "crash", "SIGQUIT"),
        (-63, "crash", "signal 63"),
    ],
)
def test_a_process_that_left_nothing_is_named_by_its_exit(code, kind, words):
    found = from_exit(code, rank=1)
    assert found.kind == kind
    assert words in found.cause


def test_a_kill_is_want_of_memory_where_something_shows_it():
    memory = KillEvidence(by_kernel=True, words="the kernel has killed a process of this machine for want of memory")
    found = from_exit(-signal.SIGKILL, rank=1, memory=memory)
    assert (found.kind, found.cause, found.exit_code) == (OutcomeKind.OOM, f"killed by SIGKILL: {memory.words}", -9)
    # A process that left by itself, or of another signal, is not the one that was killed.
    assert from_exit(1, memory=memory).kind is OutcomeKind.CRASH
    assert from_exit(-signal.SIGTERM, memory=memory).kind is OutcomeKind.CANCELLED


def test_a_kill_by_hand_is_told_where_the_kernel_shows_that_it_was_not_the_sender():
    memory = KillEvidence(by_kernel=False, words="the kernel has killed nothing")
    found = from_exit(-signal.SIGKILL, rank=1, memory=memory)
    assert (found.kind, found.cause) == (OutcomeKind.CRASH, "killed by SIGKILL: the kernel has killed nothing")


def test_every_kinds_own_exit_code_leads_back_to_it():
    for kind in OutcomeKind:
        expected = OutcomeKind.CRASH if kind is OutcomeKind.DONE else kind
        assert from_exit(kind.exit_code).kind is expected


def test_a_signal_is_recorded_one_way():
    assert from_exit(137).exit_code == from_exit(-9).exit_code == -9


def test_the_first_cause_is_a_failure_of_its_own_then_a_told_one_then_the_earliest():
    lost = from_exception(ConnectionResetError("Connection reset by peer"), rank=0)
    killed = from_exit(-9, rank=2)
    told = from_exception(MemoryError(), rank=3)
    handed_on = from_exit(-15, rank=1)
    assert first_cause([lost, handed_on, killed]) is killed
    assert first_cause([lost, killed, told, handed_on]) is told
    assert first_cause([handed_on, lost]) is lost
    late, early = (Outcome(kind=OutcomeKind.CRASH, rank=rank, ended=ended) for rank, ended in ((0, 2.0), (1, 1.0)))
    assert first_cause([late, early]) is early


def test_of_ranks_that_hang_the_one_that_did_the_fewest_steps_is_the_cause():
    first, behind = (
        Outcome(kind=OutcomeKind.HANG, rank=rank, step=step, ended=ended, traceback="in a collective")
        for rank, step, ended in ((0, 4, 1.0), (1, 3, 2.0))
    )
    assert first_cause([first, behind]) is behind
    silent = Outcome(kind=OutcomeKind.HANG, rank=2, step=5, ended=3.0)
    assert first_cause([first, behind, silent]) is silent

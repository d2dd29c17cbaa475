"""Notes of ranks that hang, those of ranks that do not answer, and the verdict over all of them."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests import tiny
from tests.records.test_hang import stored
from tests.until import until
from titanlab.distributed import await_notes, hangs_of_others, has_hung, hung_attempt, judged, note_silence, world_of
from titanlab.distributed import hang as silence
from titanlab.records import Outcome, OutcomeKind, config_text, first_cause, from_exception, is_silent, write_hang
from titanlab.records.hang import hang_folder
from titanlab.system import process_state

ADVICE = "steps before it took 0.1 s (median of 9); training.step_timeout_seconds=6"


def waits(rank, *, step=3, where="all_gather (distributed/x.py:7)", echo=True):
    verb = "waits" if echo else "stands"
    return Outcome(
        kind=OutcomeKind.HANG,
        rank=rank,
        step=step,
        cause=f"step {step + 1} did not end within 6 s: rank {rank} {verb} in {where}; {ADVICE}",
        traceback="Traceback",
        exit_code=71,
        echo=echo,
    )


def silent(rank, why="its process is stopped (SIGSTOP)"):
    cause = f"step 4 did not end within 6 s: rank {rank} does not answer: {why}; {ADVICE}"
    return Outcome(kind=OutcomeKind.HANG, rank=rank, step=3, cause=cause)


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path, shard=2))


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


@pytest.fixture
def stopped(process):
    process.send_signal(signal.SIGSTOP)
    until(lambda: process_state(process.pid) == "T")
    return process


@pytest.mark.parametrize(
    ("notes", "world", "rank", "begins"),
    [
        *(
            (
                [silent(each) if each == rank else waits(each) for each in range(4)],
                4,
                rank,
                f"rank {rank} does not answer: its",
            )
            for rank in (0, 1, 3)
        ),
        # It comes before one that stands elsewhere.
        ([waits(0), waits(1, echo=False), silent(2)], 3, 2, "rank 2 does not answer: its process is stopped"),
        (
            [waits(0), silent(1), silent(2, "it waits for a disk")],
            3,
            1,
            "ranks 1, 2 do not answer (rank 1: its process is stopped (SIGSTOP), rank 2: it waits for a disk); steps",
        ),
        # Nobody has said anything of them.
        ([waits(0), waits(2)], 3, 1, "rank 1 does not answer: it has left no record; "),
        ([waits(0)], 64, 1, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more do not answer"),
    ],
)
def test_the_rank_that_does_not_answer_is_the_cause_and_never_one_that_waits(notes, world, rank, begins):
    found = judged(notes, world, {})
    assert (found.rank, found.echo, found.traceback) == (rank, False, None)
    assert found.cause.startswith(f"step 4 did not end within 6 s: {begins}")
    assert found.cause.endswith(ADVICE)
    assert is_silent(found)


@pytest.mark.parametrize(("notes", "world"), [([waits(0), waits(1, step=2)], 2), ([waits(0)], 1), ([waits(0)], 0)])
def test_of_ranks_that_all_wait_and_left_no_record_none_is_named(notes, world):
    found = judged(notes, world, {})
    assert (found.rank, found.echo) == (None, False)
    assert re.fullmatch(
        rf"step \d did not end within 6 s: the ranks wait for each other; {re.escape(ADVICE)}", found.cause
    )


def test_a_rank_that_failed_is_the_cause():
    failed = from_exception(LookupError("x"), rank=1)
    assert judged([waits(0), silent(2), failed], 3, {}) is failed


def test_a_collective_that_timed_out_waited_for_another_rank():
    error = RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete")
    late = from_exception(error, rank=0)
    assert (late.kind, late.echo) == (OutcomeKind.HANG, True)
    assert judged([late, silent(1)], 2, {}).rank == 1
    assert judged([late], 2, {}).rank == 1
    assert first_cause([late, waits(1, echo=False)]).rank == 1


def test_a_stopped_process_is_noted_by_whoever_stands_beside_it(run, stopped):
    run.write_failure(waits(0))
    await_notes(run, {0: os.getpid(), 1: stopped.pid}, since=0.0)
    (_, note) = run.failures(1)
    assert (note.rank, note.step, is_silent(note)) == (1, 3, True)
    assert (
        note.cause
        == f"step 4 did not end within 6 s: rank 1 does not answer: its process is stopped (SIGSTOP); {ADVICE}"
    )


def test_one_that_native_code_holds_is_asked_for_its_stacks(run):
    # As a worker does that holds Python's lock: only the handler in C can run.
    script = "import faulthandler as f, signal, ctypes; f.register(signal.SIGUSR1); print(flush=True); ctypes.PyDLL(None).sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True) as child:
        child.stdout.readline()
        until(lambda: process_state(child.pid) == "S")
        run.write_failure(waits(0))
        assert note_silence(run, 1, child.pid, since=0.0)
        child.kill()
        assert "most recent call first" in child.stderr.read()
    (_, note) = run.failures(1)
    assert (
        "rank 1 does not answer: its process sleeps in native code that lets no other thread run (state S)"
        in note.cause
    )


def test_nobody_is_accused_where_no_rank_hangs_or_who_has_spoken(run, stopped):
    def notes():
        await_notes(run, {1: stopped.pid}, since=0.0)
        return {note.rank: note for note in run.failures(1)}

    assert notes() == {}
    assert process_state(2**22 + 1) is None
    run.write_failure(from_exception(LookupError("x"), rank=0))
    assert set(notes()) == {0}
    run.write_failure(waits(0))
    run.write_failure(waits(1, echo=False))
    assert notes()[1].traceback == "Traceback"
    assert not note_silence(run, 1, stopped.pid, since=0.0)


def test_notes_of_an_earlier_attempt_accuse_nobody(run, stopped):
    run.write_failure(waits(0))
    assert hangs_of_others(run, 1, since=time.time() + 1) == []
    assert not note_silence(run, 1, stopped.pid, since=time.time() + 1)
    run.begin_attempt(run.config(), {})
    assert hangs_of_others(run, 1, since=0.0) == []
    assert hangs_of_others(replace(run, path=run.path / "nowhere"), 1, since=0.0) == []


def test_answers_are_awaited_only_where_ranks_hang(run, monkeypatch):
    monkeypatch.setattr(silence, "ANSWER_SECONDS", 300)
    await_notes(run, {}, since=0.0, world=3)
    for rank in range(2):
        run.write_failure(waits(rank))
    begin = time.monotonic()
    await_notes(run, {0: os.getpid()}, since=0.0, world=2)
    assert time.monotonic() - begin < 60
    # Rank 2 is on another host, and writes none.
    monkeypatch.setattr(silence, "ANSWER_SECONDS", 0.1)
    await_notes(run, {0: os.getpid()}, since=0.0, world=3)
    assert [note.rank for note in run.failures(1)] == [0, 1]


GROUPS = {"0": {"axis": "shard", "ranks": [0, 1, 2]}}


@pytest.fixture
def hung(tmp_path):
    """Ranks 0 and 2 have records, and wait for rank 1, which does not answer."""
    run = tiny.begin(tiny.recipe(tmp_path, shard=3))
    for rank in (0, 2):
        write_hang(run, 1, stored(rank=rank, groups=GROUPS))
        run.write_failure(waits(rank))
    run.write_failure(silent(1))
    return run


def test_an_attempt_has_hung_if_a_rank_says_so(hung):
    assert has_hung(hung, 1)
    hung.begin_attempt(hung.config(), {})
    hung.write_failure(Outcome(kind=OutcomeKind.CRASH, rank=0, attempt=2, cause="LookupError: x"))
    assert not has_hung(hung, 2)
    # Another rank lost the first one, and waited.
    hung.write_failure(Outcome(kind=OutcomeKind.HANG, rank=1, attempt=2, cause="x"))
    assert has_hung(hung, 2)
    assert has_hung(hung, 1)


def test_records_and_what_is_known_of_the_ranks_without_one(hung):
    found = hung_attempt(hung, 1)
    silence = "does not answer: its process is stopped (SIGSTOP)"
    assert ([row["state"] for row in found.rows], found.damaged) == (["waits", silence, "waits"], [])
    assert (found.diagnosis.ranks, found.diagnosis.pending) == ((1,), "all_reduce (shard, sequence number 3)")
    # The rank ended in another way, with a cause or without.
    for cause, told in ((None, OutcomeKind.OOM.meaning), ("no memory left", "no memory left")):
        hung.write_failure(Outcome(kind=OutcomeKind.OOM, rank=1, attempt=1, cause=cause))
        assert hung_attempt(hung, 1).rows[1]["state"] == told


def test_a_rank_that_waits_and_whose_record_is_damaged_is_named(hung):
    path = hang_folder(hung, 1) / "rank-2.json"
    path.write_text("{")
    found = hung_attempt(hung, 1)
    assert [row["state"] for row in found.rows][::2] == ["waits", "damaged"]
    assert [str(path) in line for line in found.damaged] == [True]
    # A damaged file is not a reason to suspect its rank.
    assert found.diagnosis.ranks == (1,)


@pytest.mark.parametrize("world", [None, 0, -3, "3", 1_000_001])
def test_a_world_that_is_none_is_not_known(hung, world):
    (hung.attempt_folder(1) / "config.yaml").write_text(config_text({**hung.config(), "world": world}))
    assert (world_of(hung, 1), hung_attempt(hung, 1).diagnosis.ranks) == (0, (1,))
    hung.begin_attempt({**hung.config(), "world": 5}, {})
    assert world_of(hung, 2) == 5

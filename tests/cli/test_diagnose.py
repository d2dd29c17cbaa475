"""`titanlab diagnose RUN` over runs that hung, and over others."""

import json

import pytest

from tests import tiny
from tests.distributed.test_hang import silent, waits
from tests.records.test_hang import stored, values
from titanlab.records import Outcome, OutcomeKind, write_hang
from titanlab.records.hang import hang_folder

VERB = "diagnose"

GROUPS = {"0": {"axis": "shard", "ranks": [0, 1, 2]}}


@pytest.fixture
def run(tmp_path):
    made = tiny.begin(tiny.recipe(tmp_path, shard=3))
    for rank in (0, 2):
        write_hang(made, 1, stored(rank=rank, groups=GROUPS))
        made.write_failure(waits(rank))
    made.write_failure(silent(1))
    return made


def test_the_verdict_the_table_and_the_stacks(run, say):
    code, out, err = say(run.path)
    assert (code, err) == (0, "")
    place = "forward_backward (titanlab/train/assemble.py:228)"
    assert out.splitlines() == [
        (
            f"{run.path.name}, attempt 1: rank 1 does not answer: its process is stopped (SIGSTOP); "
            f"ranks 0, 2 wait in all_reduce (shard, sequence number 3) at {place}"
        ),
        "",
        "rank  state                                              phase   last collective                                         waits for",
        "0     waits                                              step 4  all_reduce (shard, sequence number 3): pending for 0 s  1",
        "1     does not answer: its process is stopped (SIGSTOP)",
        "2     waits                                              step 4  all_reduce (shard, sequence number 3): pending for 0 s  1",
        "",
        "ranks 0, 2, innermost call first:",
        f"  {place}",
    ]


def test_a_rank_that_computes_and_its_last_collective(run, say):
    done = [{**values()["collectives"][0], "sequence": 2, "is_done": True}]
    late = stored(rank=2, groups=GROUPS, state="computes", activity="data", collectives=done, stack=[])
    write_hang(run, 1, late)
    lines = say(run.path)[1].splitlines()
    assert (
        "2     computes (data)                                    step 4  all_reduce (shard, sequence number 2): done"
        in lines
    )
    assert lines[-2:] == ["rank 0, innermost call first:", "  forward_backward (titanlab/train/assemble.py:228)"]


def test_as_json(run, say):
    found = json.loads(say(run.path, "--json")[1])
    assert (found["hung"], found["ranks"], found["damaged"], found["outcome"]) == (True, [1], [], None)
    assert found["pending"] == "all_reduce (shard, sequence number 3)"
    assert [(row["rank"], row["is_named"], row["waits_for"]) for row in found["rows"]] == [
        (0, False, [1]),
        (1, True, []),
        (2, False, [1]),
    ]


def test_a_damaged_record_is_named_and_the_rest_is_analysed(run, say):
    path = hang_folder(run, 1) / "rank-2.json"
    path.write_text("{")
    code, out, err = say(run.path)
    assert code == 0
    assert err.startswith(f"warning: run={path}: is not JSON (")
    assert err.count("\n") == 1
    assert "rank 1 does not answer: its process is stopped (SIGSTOP); rank 0 waits in all_reduce" in out
    assert "\n2     damaged\n" in out


@pytest.mark.parametrize("kind", ["no run", "crash", "done"])
def test_a_run_that_did_not_hang_has_one_line(tmp_path, say, kind):
    run = tiny.begin(tiny.recipe(tmp_path))
    end = f"{run.path.name}, attempt 1, did not hang; it "
    if kind == "no run":
        expected = f"{end}has not ended (starting)\n"
    else:
        run.write_result(Outcome(kind=OutcomeKind(kind), attempt=1, cause="x" if kind == "crash" else None))
        expected = f"{end}ended as crash: x\n" if kind == "crash" else f"{end}ended as done: all steps are done\n"
    assert say(run.path) == (0, expected, "")
    assert json.loads(say(run.path, "--json")[1])["hung"] is False


def test_an_attempt_of_several(run, say):
    run.begin_attempt(run.config(), {})
    assert say(run.path)[1] == (
        f"{run.path.name}, attempt 2, did not hang; it has not ended (starting); attempt 1 hung, see --attempt 1\n"
    )
    assert "rank 1 does not answer" in say(run.path, "--attempt", 1)[1]
    code, out, err = say(run.path, "--attempt", 3)
    assert (code, out) == (2, "")
    assert err == "error: --attempt=3: the run has no such attempt; known: 1, 2; try --attempt 2\n"


def test_a_run_that_goes_on_and_has_a_stopped_rank(tmp_path, say):
    run = tiny.begin(tiny.recipe(tmp_path))
    run.keep_stopped(1, 1, "rank 1: its process is stopped (SIGSTOP) since 12:00:00")
    told = "rank 1: its process is stopped (SIGSTOP) since 12:00:00"
    assert say(run.path) == (0, f"{run.path.name}, attempt 1, has not ended; {told}\n", "")
    run.keep_stopped(1, 1, None)
    assert "did not hang; it has not ended (starting)" in say(run.path)[1]

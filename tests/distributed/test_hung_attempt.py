"""What the records of an attempt say of its hang, where some ranks have none."""

import pytest

from tests import tiny
from tests.distributed.test_silence import silent, waits
from tests.records.test_hang_file import values
from titanlab.distributed import has_hung, hung_attempt
from titanlab.records import Outcome, OutcomeKind, config_text, write_hang
from titanlab.records.hang_file import hang_folder, parse_hang

GROUPS = {"0": {"axis": "shard", "ranks": [0, 1, 2]}}


@pytest.fixture
def run(tmp_path):
    """Ranks 0 and 2 have records, and wait for rank 1, which does not answer."""
    run = tiny.begin(tiny.recipe(tmp_path, shard=3))
    for rank in (0, 2):
        write_hang(run, 1, parse_hang(values(rank=rank, groups=GROUPS)))
        run.write_failure(waits(rank))
    run.write_failure(silent(1))
    return run


def test_an_attempt_has_hung_if_a_rank_says_so(run):
    assert has_hung(run, 1)
    run.begin_attempt(run.config(), {})
    run.write_failure(Outcome(kind=OutcomeKind.CRASH, rank=0, attempt=2, cause="LookupError: x"))
    assert not has_hung(run, 2)
    # Another rank lost the first one, and waited.
    run.write_failure(Outcome(kind=OutcomeKind.HANG, rank=1, attempt=2, cause="x"))
    assert has_hung(run, 2)
    assert has_hung(run, 1)


def test_records_and_what_is_known_of_the_ranks_without_one(run):
    found = hung_attempt(run, 1)
    assert (sorted(found.records), found.damaged, found.world) == ([0, 2], {}, 3)
    assert found.others == {1: "does not answer: its process is stopped (SIGSTOP)"}
    assert (found.diagnosis.ranks, found.diagnosis.pending) == ((1,), "all_reduce (shard, sequence number 3)")


@pytest.mark.parametrize(
    ("cause", "told"), [(None, OutcomeKind.OOM.meaning), ("no memory left; 3 GiB", "no memory left")]
)
def test_of_a_rank_that_ended_otherwise_the_cause_or_the_kind_is_told(run, cause, told):
    run.write_failure(Outcome(kind=OutcomeKind.OOM, rank=1, attempt=1, cause=cause))
    assert hung_attempt(run, 1).others == {1: told}


def test_a_rank_that_waits_and_whose_record_is_damaged_is_named(run):
    path = hang_folder(run, 1) / "rank-2.json"
    path.write_text("{")
    found = hung_attempt(run, 1)
    assert (sorted(found.records), list(found.damaged)) == ([0], [2])
    assert found.damaged[2].startswith(f"{path}: ")
    assert found.others[2] == "waits in all_gather (distributed/x.py:7)"
    # What is damaged is no reason to suspect that rank.
    assert found.diagnosis.ranks == (1,)


def test_the_world_is_that_of_the_attempt(run):
    run.begin_attempt({**run.config(), "world": 5}, {})
    assert (hung_attempt(run, 1).world, hung_attempt(run, 2).world) == (3, 5)


@pytest.mark.parametrize("world", [None, 0, -3, True, "3", 1_000_001])
def test_a_world_that_is_none_is_not_known(run, world):
    (run.attempt_folder(1) / "config.yaml").write_text(config_text({**run.config(), "world": world}))
    found = hung_attempt(run, 1)
    assert (found.world, found.diagnosis.ranks) == (0, (1,))


def test_a_config_that_cannot_be_read_does_not_hide_the_hang(run):
    (run.attempt_folder(1) / "config.yaml").write_text("a: [")
    assert (hung_attempt(run, 1).world, hung_attempt(run, 1).diagnosis.ranks) == (0, (1,))

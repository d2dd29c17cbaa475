"""Collectives that ranks call differently: the first difference, who is wrong, and what was expected instead."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from titanlab.records import Collective, GroupRecord, HangRecord
from titanlab.records.diagnosis import Mismatch, deviation, first_mismatch, group_key, signature


def call(operation: str, sequence: int, *sizes: int, group: str = "0", is_message: bool = False) -> Collective:
    return Collective(group, sequence, operation, (tuple(sizes),), ("float32",), is_message, is_done=True)


def record(calls: Sequence[Collective], *, rank: int = 0, groups: dict[str, GroupRecord] | None = None) -> HangRecord:
    return HangRecord(
        rank=rank,
        state="waits",
        phase="step 3",
        step=2,
        seconds=1.0,
        limit=None,
        activity="",
        source=None,
        stack=(),
        groups={"0": GroupRecord("data", (0, 1, 2))} if groups is None else groups,
        messages=None,
        collectives=tuple(calls),
    )


STEP = (("all_gather", 4), ("reduce_scatter", 8), ("all_reduce", 1), ("broadcast", 2))


def steps(count: int, *, last: Sequence[tuple[str, int]] = STEP) -> list[Collective]:
    """The collectives of so many steps; of the last one others may be given."""
    called = [*(STEP * (count - 1)), *last]
    return [call(operation, number, size) for number, (operation, size) in enumerate(called, 1)]


def mismatch_of(*calls: Sequence[Collective]) -> Mismatch | None:
    return first_mismatch({rank: record(each, rank=rank) for rank, each in enumerate(calls)})


@pytest.mark.parametrize("calls", [[], [[]], [steps(2)], [steps(2), steps(2)], [steps(3), steps(2), []]])
def test_ranks_that_call_the_same_do_not_differ(calls: list[list[Collective]]) -> None:
    assert mismatch_of(*calls) is None


def test_of_three_ranks_the_one_that_is_alone_is_wrong() -> None:
    calls = [[call("all_reduce", 1, 4)], [call("all_reduce", 1, 5)], [call("all_reduce", 1, 4)]]
    found = mismatch_of(*calls)
    assert found is not None
    assert (found.group, found.sequence, found.wrong, found.deviation) == (("0", (0, 1, 2)), 1, (1,), None)
    assert found.collectives == {rank: each[0] for rank, each in enumerate(calls)}


def test_of_two_ranks_without_a_past_none_is_named() -> None:
    found = mismatch_of([call("all_reduce", 1, 4)], [call("broadcast", 1, 4)])
    assert found is not None
    assert (found.wrong, found.deviation) == ((), None)


def test_the_rank_that_differs_from_its_own_past_is_wrong() -> None:
    skipped = (STEP[0], STEP[2], STEP[3])
    found = mismatch_of(steps(3), steps(3, last=skipped))
    assert found is not None
    assert (found.sequence, found.wrong) == (10, (1,))
    assert found.deviation is not None
    assert (found.deviation.called.operation, found.deviation.expected.operation) == ("all_reduce", "reduce_scatter")
    assert found.deviation.is_skip


def test_what_is_called_in_addition_skips_nothing() -> None:
    more = (STEP[0], ("all_to_all", 3), *STEP[1:])
    found = mismatch_of(steps(3), steps(3, last=more))
    assert found is not None
    assert found.wrong == (1,)
    assert found.deviation is not None
    assert (found.deviation.called.operation, found.deviation.is_skip) == ("all_to_all", False)


def test_if_all_ranks_differ_from_their_past_none_is_named() -> None:
    found = mismatch_of(steps(3, last=(STEP[0], ("a", 1))), steps(3, last=(STEP[0], ("b", 1))))
    assert found is not None
    assert (found.sequence, found.wrong, found.deviation) == (10, (), None)


@pytest.mark.parametrize(
    ("operation", "differs"), [("all_reduce", True), ("reduce_scatter", True), ("all_to_all", False), ("send", False)]
)
def test_sizes_count_where_all_ranks_must_have_the_same(operation: str, differs: bool) -> None:
    found = mismatch_of([call(operation, 1, 4)], [call(operation, 1, 5)])
    assert (found is not None) is differs


def test_messages_do_not_count() -> None:
    messages = [call("send", 1, 4, is_message=True)], [call("recv", 1, 4, is_message=True)]
    assert mismatch_of(*messages) is None


def test_a_group_that_a_rank_does_not_know_is_left_out() -> None:
    calls = [[call("all_reduce", 1, rank, group="9")] for rank in range(2)]
    assert mismatch_of(*calls) is None
    records = {rank: record(each, groups={"9": GroupRecord("data", ())}) for rank, each in enumerate(calls)}
    assert first_mismatch(records) is None


def test_groups_of_one_name_and_other_ranks_are_apart() -> None:
    records = {
        rank: record([call("all_reduce", 1, rank)], groups={"0": GroupRecord("shard", ranks)})
        for rank, ranks in enumerate([(0, 1), (2, 3)])
    }
    assert first_mismatch(records) is None


def test_a_difference_that_shows_who_is_wrong_comes_first() -> None:
    groups = {"0": GroupRecord("a", (0, 1)), "1": GroupRecord("b", (0, 1, 2))}
    calls = {
        0: [call("all_reduce", 1, 4), call("all_reduce", 1, 4, group="1")],
        1: [call("broadcast", 1, 4), call("all_reduce", 1, 4, group="1")],
        2: [call("broadcast", 1, 4, group="1")],
    }
    found = first_mismatch({rank: record(each, rank=rank, groups=groups) for rank, each in calls.items()})
    assert found is not None
    assert (found.group, found.wrong) == (("1", (0, 1, 2)), (2,))


def test_a_group_is_known_by_name_and_ranks() -> None:
    one = record([], groups={"7": GroupRecord("shard", (0, 1))})
    assert (group_key(one, "7"), group_key(one, "8")) == (("7", (0, 1)), ("8", ()))


def test_what_calls_of_different_steps_have_in_common() -> None:
    one = record([])
    assert signature(one, call("all_reduce", 5, 4)) == ("data", "all_reduce", ((4,),))
    assert signature(one, call("all_to_all", 5, 4)) == ("data", "all_to_all", ())
    assert signature(one, call("all_reduce", 5, 4, group="9")) == ("group 9", "all_reduce", ((4,),))


def test_a_call_that_is_as_in_earlier_steps_does_not_deviate() -> None:
    calls = steps(3)
    assert [deviation(record(calls), each) for each in calls] == [None] * 12


def test_a_past_that_is_too_short_shows_nothing() -> None:
    calls = [call("a", 1), call("b", 2), call("a", 3), call("c", 4)]
    assert deviation(record(calls), calls[-1]) is None

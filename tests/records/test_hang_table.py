"""A diagnosis as a table: a row for each rank, also of those without a record, and the places below it."""

from __future__ import annotations

from tests.records.test_diagnosis import STEP, record
from titanlab.records import diagnose, rank_rows, table_lines


def rows_of(*records, others=None, world=3):
    by_rank = {each.rank: each for each in records}
    return rank_rows(diagnose(by_rank, world=world), by_rank, others or {}, world=world)


def test_without_a_rank_there_are_only_headings():
    assert rows_of(world=0) == []
    assert table_lines([]) == ["rank  state  phase  last collective  waits for"]


def test_each_rank_has_a_row_also_beyond_the_world():
    rows = rows_of(record(1, STEP), others={5: "ended"}, world=2)
    assert [(row["rank"], row["state"]) for row in rows] == [(0, "no record"), (1, "waits"), (5, "ended")]
    # All rows have the same keys: they are one table, and one JSON list.
    assert len({frozenset(row) for row in rows}) == 1
    assert (rows[0]["waits_for"], rows[0]["stack"], rows[0]["last"]) == ([], [], None)


def test_who_waits_for_whom():
    late = record(2, STEP[:2], state="computes", activity="data")
    rows = rows_of(record(0, STEP[:3]), record(1, STEP[:3]), late)
    assert [row["waits_for"] for row in rows] == [[2], [2], []]
    assert [row["is_named"] for row in rows] == [False, False, True]
    assert [row["is_done"] for row in rows] == [False, False, True]
    assert rows[2]["state"] == "computes (data)"
    assert rows[0]["last"] == "reduce_scatter (shard, sequence number 3)"
    lines = table_lines(rows)
    assert lines[1].split() == "0 waits step 4 reduce_scatter (shard, sequence number 3): pending 2".split()
    assert lines[3].split() == "2 computes (data) step 4 all_gather (shard, sequence number 2): done".split()


def test_columns_are_aligned_and_lines_end_without_spaces():
    rows = rows_of(record(0, STEP[:3]), record(1, []), world=12)
    lines = table_lines(rows)[:13]
    assert all(line == line.rstrip() for line in lines)
    begins = lines[0].index("state")
    assert {line[begins - 1] for line in lines} == {" "}
    assert all(line[begins] != " " for line in lines)


def test_ranks_at_one_place_share_one_stack():
    lines = table_lines(rows_of(*(record(rank, STEP) for rank in range(2)), world=2))
    assert lines[3:] == [
        "",
        "ranks 0, 1, innermost call first:",
        "  forward_backward (titanlab/train/assemble.py:228)",
    ]


def test_a_rank_without_a_collective_has_none():
    (row,) = rows_of(record(0, [], state="computes"), world=1)
    assert (row["last"], row["is_done"], row["sequence"]) == (None, None, None)

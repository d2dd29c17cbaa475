"""Declared against traced: neighbouring blocks are one row, and every difference is found."""

from __future__ import annotations

import dataclasses

from titanlab.costs import TrafficRow
from titanlab.prove import TraceComparison, comparison_rows, comparison_values
from titanlab.prove.declared import RankAccount

GATHER = TrafficRow(axis="shard", kind="all_gather", count=2, bytes=64, wire_bytes=32)
DECLARED = RankAccount(
    rank=3, parameters=10, parameter_bytes=40, optimizer_bytes=80, saved={0: 5, 1: 5, 2: 7, 4: 7}, traffic=(GATHER,)
)


def compared(tiny_recipe=None, **changed):
    traced = dataclasses.replace(DECLARED, **changed)
    return TraceComparison(recipe=tiny_recipe, notes=(), pairs=((DECLARED, traced),))


def test_equal_accounts_have_no_difference():
    found = compared()
    assert found.differing == []
    assert [item.name for item in found.items] == [
        "parameters of its stages",
        "parameter bytes",
        "optimizer bytes",
        "each of blocks 0 to 1: saved bytes",
        "block 2: saved bytes",
        "block 4: saved bytes",
        "shard all_gather count",
        "shard all_gather bytes",
    ]


def test_every_figure_can_differ():
    other = TrafficRow(axis="tensor", kind="all_reduce", count=1, bytes=8, wire_bytes=8)
    found = compared(
        parameters=11, parameter_bytes=44, optimizer_bytes=0, saved={0: 5, 1: 6, 2: 7}, traffic=(GATHER, other)
    )
    assert {item.name: (item.declared, item.traced) for item in found.differing} == {
        "parameters of its stages": (10, 11),
        "parameter bytes": (40, 44),
        "optimizer bytes": (80, 0),
        "block 1: saved bytes": (5, 6),
        "block 4: saved bytes": (7, 0),
        "tensor all_reduce count": (0, 1),
        "tensor all_reduce bytes": (0, 8),
    }
    fewer = dataclasses.replace(GATHER, count=1, bytes=32)
    assert [item.difference for item in compared(traffic=(fewer,)).differing] == [-1, -32]


def test_rows_are_text():
    rows = comparison_rows(compared(parameter_bytes=4000).items)
    assert rows[0] == ["3", "parameters of its stages", "10", "10", "0"]
    assert rows[1] == ["3", "parameter bytes", "40", "4,000", "+3,960"]


def test_values_are_plain(tmp_path):
    from tests import tiny

    values = comparison_values(compared(tiny.recipe(tmp_path), parameters=11))
    assert values["equal"] is False
    assert values["items"][0] == {
        "rank": 3, "name": "parameters of its stages", "declared": 10, "traced": 11, "difference": 1
    }  # fmt: skip
    assert values["optimizer_traffic"] == {"3": []}

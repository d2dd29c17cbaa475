"""The table of what is sent: sums, wire bytes, lines and keys."""

import pytest

from titanlab.costs import Traffic, traffic_lines, traffic_metrics
from titanlab.costs.traffic_account import wire_bytes


def a_table():
    traffic = Traffic()
    traffic.add("world", "all_reduce", 40, ranks=8)
    traffic.add("shard·context", "reduce_scatter", 12_600_000, ranks=4)
    traffic.add("shard·context", "all_gather", 2_100_000, ranks=4, times=12)
    traffic.add("pipeline", "send", 999, ranks=2, times=2)
    return traffic


def test_rows_are_summed_and_ordered():
    traffic = a_table()
    traffic.add("pipeline", "send", 1, ranks=2)
    assert [(row.axis, row.kind, row.count, row.bytes) for row in traffic.rows()] == [
        ("pipeline", "send", 3, 1999),
        ("shard·context", "all_gather", 12, 25_200_000),
        ("shard·context", "reduce_scatter", 1, 12_600_000),
        ("world", "all_reduce", 1, 40),
    ]


def test_nothing_is_sent_alone_or_never():
    traffic = Traffic()
    traffic.add("shard", "all_gather", 100, ranks=1)
    traffic.add("shard", "all_gather", 100, ranks=2, times=0)
    assert traffic.rows() == []


def test_lines_are_one_an_axis():
    assert traffic_lines(a_table().rows()) == [
        "pipeline: 2 send 2.0 kB",
        "shard·context: 12 all_gather 25.2 MB, 1 reduce_scatter 12.6 MB",
        "world: 1 all_reduce 40 B",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (3 * 10**15, "3000.0 TB")],
)
def test_sizes_are_short(size, text):
    traffic = Traffic()
    traffic.add("tensor", "broadcast", size, ranks=2)
    assert traffic_lines(traffic.rows()) == [f"tensor: 1 broadcast {text}"]


def test_keys_are_plain_and_values_whole():
    found = traffic_metrics(a_table().rows())
    assert found["traffic/shard_context/all_gather_count"] == 12
    assert found["traffic/shard_context/all_gather_bytes"] == 25_200_000
    assert found["traffic/shard_context/all_gather_wire_bytes"] == 25_200_000 * 3 // 4
    assert len(found) == 12
    assert all(key.isascii() for key in found)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 150),
        ("all_gather", 75),
        ("reduce_scatter", 75),
        ("all_to_all", 75),
        ("send", 100),
        ("broadcast", 100),
        ("recv", 0),
    ],
)
def test_what_a_ring_of_four_sends(kind, expected):
    assert wire_bytes(kind, 100, ranks=4) == expected

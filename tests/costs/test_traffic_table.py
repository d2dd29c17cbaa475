"""The table of what is sent: sums by hand and of all ranks, names of groups, wire bytes, lines and keys."""

import pytest

from tests import tiny
from titanlab.costs import Coordinate, Layout, Step, Traffic, step_traffic, traffic_lines, traffic_metrics
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
    # Nothing is sent alone or never.
    traffic.add("shard", "all_gather", 100, ranks=1)
    traffic.add("shard", "all_gather", 100, ranks=2, times=0)
    assert [(row.axis, row.kind, row.count, row.bytes) for row in traffic.rows()] == [
        ("pipeline", "send", 3, 1999),
        ("shard·context", "all_gather", 12, 25_200_000),
        ("shard·context", "reduce_scatter", 1, 12_600_000),
        ("world", "all_reduce", 1, 40),
    ]


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


ACCOUNT = tiny.Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=256).account()


def table(**given):
    """The traffic of a Llama of two blocks with a dim of 64: (axis, kind) → count and bytes."""
    place = given.pop("place", Coordinate())
    step = Step(account=ACCOUNT, **{"seq_len": 32, "microbatch": 2, **given})
    return {(row.axis, row.kind): (row.count, row.bytes) for row in step_traffic(step, place)}


BLOCK, REST = 2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192, 2 * 256 * 64 + 64


def test_what_nobody_needs_is_not_sent():
    assert table(layout=Layout()) == {}
    assert table(layout=Layout(), mixed=True, compute_bytes=2) == {}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_what_is_sent_along_the_context_arrives(ranks, method):
    layout = Layout(context=ranks)
    tables = [
        table(layout=layout, place=Coordinate(context=rank), seq_len=48, context_method=method) for rank in range(ranks)
    ]
    sent, received = (sum(each.get(("context", kind), (0, 0))[1] for each in tables) for kind in ("send", "recv"))
    assert sent == received
    if method == "ring":
        # In a whole ring, the blocks that go on past rank 0 are halves.
        block = 4 * 2 * 48 // ranks * 2 * 16
        assert sent == 2 * 2 * 3 * block * ranks * (ranks - 1) * 3 // 4


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        # By axis of the formulas, the name in the table.
        ({}, {"world": "world", "fsdp": "shard", "tensor": "tensor"}),
        ({"shard": 2}, {"world": "shard", "fsdp": "shard"}),
        ({"tensor": 2}, {"world": "tensor", "tensor": "tensor", "fsdp": "shard"}),
        # Axes that share a dimension of the mesh have one name, unless one of them has all ranks.
        ({"context": 2}, {"world": "context", "fsdp": "context", "context": "context"}),
        ({"shard": 2, "context": 2}, {"world": "shard·context", "fsdp": "shard·context", "context": "context"}),
        ({"shard": 2, "tensor": 2}, {"world": "world", "fsdp": "shard", "tensor": "tensor"}),
        ({"replicate": 2, "shard": 2}, {"world": "world", "replicate": "replicate", "fsdp": "shard"}),
        ({"shard": 2, "tensor": 2, "expert": 4}, {"world": "expert", "expert": "expert", "tensor": "tensor"}),
        ({"shard": 4, "expert": 2}, {"world": "shard", "expert": "expert", "expert_shard": "expert_shard"}),
    ],
    ids=str,
)
def test_a_group_of_all_ranks_has_the_name_of_the_axis_with_all(layout, names):
    step = Step(account=ACCOUNT, layout=Layout(**layout), seq_len=32, microbatch=3)
    assert {name: step.axis(name) for name in names} == names

"""The table of what is sent: sums by hand and of all ranks, names of groups, wire bytes, lines and keys."""

import pytest

from tests import tiny
from titanlab.costs import Coordinate, Layout, Step, Traffic, add_context, step_traffic, traffic_lines, traffic_metrics
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
WORLD = (1, 56)


def test_sums_by_hand():
    whole = 2 * BLOCK + REST
    fsdp = table(layout=Layout(shard=4), microbatches=3, mixed=True, compute_bytes=2)
    assert fsdp == {
        ("shard", "all_gather"): (3 * 2 + 2, 2 * (3 * 2 * BLOCK + BLOCK + REST)),
        ("shard", "reduce_scatter"): (3, 4 * whole),
        ("shard", "all_reduce"): WORLD,
    }
    hsdp = table(layout=Layout(replicate=2, shard=4), reshards=False)
    assert hsdp == {
        ("replicate", "all_reduce"): (3, whole),
        ("shard", "all_gather"): (3, 4 * whole),
        ("shard", "reduce_scatter"): (3, 4 * whole),
        ("world", "all_reduce"): WORLD,
    }
    assert table(layout=Layout(replicate=2)) == {("replicate", "all_reduce"): (2, 4 * whole + 56)}
    hidden, loss = 4 * 2 * 32 * 64, 2 * 2 * 32 * 2 * 4
    tensor = table(layout=Layout(tensor=2), microbatches=3)
    # Forward, each block gathers and scatters twice, the embedding scatters, the head gathers; backward the reverse.
    assert tensor == {
        ("tensor", "all_gather"): (3 * 11, 3 * (10 * hidden + loss)),
        ("tensor", "reduce_scatter"): (3 * 10, 3 * 10 * hidden),
        ("tensor", "all_reduce"): (2, 4 * 5 * 64 + 56),
    }
    # Keys and values there twice and their gradients back once, two messages each.
    block = 4 * 2 * 16 * 2 * 16
    context = table(layout=Layout(context=2), place=Coordinate(context=1))
    assert context["context", "send"] == (2 * 6, 2 * 2 * (2 * block + block // 2))
    assert context["context", "recv"] == (2 * 6, 2 * 2 * (2 * block // 2 + block))


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


@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_each_rank_of_a_ring_receives_what_the_one_before_it_sends(context):
    """Forward; of blocks of ranks before it, a rank needs only the first half."""
    found = []
    for rank in range(context):
        traffic = Traffic()
        step = Step(account=ACCOUNT, layout=Layout(context=context), seq_len=48 * context, microbatch=2)
        add_context(step, Coordinate(context=rank), ("layers.0",), traffic, only_forward=True)
        found.append({row.kind: (row.count, row.bytes) for row in traffic.rows()})
    assert all(found[rank]["send"] == found[rank - 1]["recv"] for rank in range(context))


def test_microbatches_and_widths_count():
    layout = Layout(context=4)
    plain, more = table(layout=layout), table(layout=layout, microbatches=3)
    narrow = table(layout=layout, compute_bytes=2)
    mixed = table(layout=layout, compute_bytes=2, fp32_parts=["layers.0", "layers.1"])
    send = ("context", "send")
    assert more[send] == (3 * plain[send][0], 3 * plain[send][1])
    assert (narrow[send], mixed[send]) == ((plain[send][0], plain[send][1] // 2), plain[send])


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

"""What context parallelism sends for a block, as its two methods move keys and values."""

import pytest

from tests.plan.layouts import SMALL
from titanlab.costs import Coordinate, Layout, Step, Traffic, TrafficRow
from titanlab.costs.traffic_account import context_of_block, forward_context_of_block

BLOCK = "layers.0"
# 2 sequences of 64 tokens, cut in 4, with 4 heads of 32 keys or values in float32.
WHOLE = 2 * 16 * 4 * 32 * 4
HALF = WHOLE // 2


def step(context=4, **given):
    given = {"account": SMALL.account(), "layout": Layout(context=context), "seq_len": 64, "microbatch": 2, **given}
    return Step(**given)


def rows(count, rank, made):
    traffic = Traffic()
    count(made, BLOCK, Coordinate(context=rank), traffic)
    return {row.kind: row for row in traffic.rows()}


def bytes_of(count, rank, made):
    return {kind: (row.count, row.bytes) for kind, row in rows(count, rank, made).items()}


@pytest.mark.parametrize(
    ("rank", "sent", "received"),
    [
        (0, 3 * HALF, 3 * WHOLE),
        (1, 3 * WHOLE, 2 * WHOLE + HALF),
        (2, 2 * WHOLE + HALF, WHOLE + 2 * HALF),
        (3, WHOLE + 2 * HALF, 3 * HALF),
    ],
)
def test_a_ring_passes_on_what_the_next_rank_needs(rank, sent, received):
    # Keys and values are a message each.
    assert bytes_of(forward_context_of_block, rank, step()) == {"send": (6, 2 * sent), "recv": (6, 2 * received)}


@pytest.mark.parametrize("context", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [forward_context_of_block, context_of_block])
def test_what_is_sent_in_a_ring_is_received(context, count):
    made = step(context, seq_len=48 * context)
    found = [bytes_of(count, rank, made) for rank in range(context)]
    assert sum(each["send"][1] for each in found) == sum(each["recv"][1] for each in found)
    if count is forward_context_of_block:
        for rank in range(context):
            assert found[rank]["send"] == found[rank - 1]["recv"]


def test_a_whole_step_sends_keys_and_values_twice_and_their_gradients_once():
    forward = bytes_of(forward_context_of_block, 1, step())
    whole = bytes_of(context_of_block, 1, step())
    # Two ranks after it have sent it whole blocks, and one before it a half; its own go there and come back.
    assert whole["send"] == (2 * 6 + 6, 2 * forward["send"][1] + 2 * (2 * WHOLE + HALF))
    assert whole["recv"] == (2 * 6 + 6, 2 * forward["recv"][1] + 2 * (WHOLE + 2 * HALF))


def test_an_all_gather_has_the_parts_of_all_ranks():
    made = step(context_method="all_gather")
    assert rows(forward_context_of_block, 1, made) == {
        "all_gather": TrafficRow(
            axis="context", kind="all_gather", count=1, bytes=2 * 4 * WHOLE, wire_bytes=2 * 3 * WHOLE
        )
    }
    whole = rows(context_of_block, 1, made)
    assert (whole["all_gather"].count, whole["all_gather"].bytes) == (2, 2 * 2 * 4 * WHOLE)
    returned = 2 * (2 * WHOLE + HALF)
    # It keeps none of what it returns.
    assert whole["all_to_all"] == TrafficRow(
        axis="context", kind="all_to_all", count=1, bytes=returned, wire_bytes=returned
    )


def test_without_context_parallelism_nothing_is_sent():
    for method in ("ring", "all_gather"):
        assert rows(context_of_block, 0, step(1, context_method=method)) == {}


def test_microbatches_heads_and_widths_count():
    plain = bytes_of(forward_context_of_block, 1, step())
    more = bytes_of(forward_context_of_block, 1, step(microbatches=3))
    assert more["send"] == (3 * plain["send"][0], 3 * plain["send"][1])
    narrow = bytes_of(forward_context_of_block, 1, step(compute_bytes=2))
    assert narrow["send"] == (plain["send"][0], plain["send"][1] // 2)
    # A block in float32 sends float32.
    assert bytes_of(forward_context_of_block, 1, step(compute_bytes=2, fp32_parts=[BLOCK])) == plain
    halved = bytes_of(forward_context_of_block, 1, step(layout=Layout(context=4, tensor=2)))
    assert halved["send"] == (plain["send"][0], plain["send"][1] // 2)

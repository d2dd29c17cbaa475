"""What the planner says of activations is what a whole step keeps: of each policy of checkpointing, and each schedule."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest

from tests import tiny
from tests.plan.kept import LOG_PROBABILITY_BYTES, allocated_at, allocated_before_backward, most_between_actions
from titanlab.costs import Share
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan import share_of
from titanlab.plan.memory import deferred_bytes, edge_bytes, in_flight, memory, saved_bytes, stored_pieces
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.schedule.action import peak_in_flight
from titanlab.techniques.schedule.published_schema import (
    ZBV,
    DualPipeV,
    Interleaved1F1B,
    InterleavedZeroBubble,
    OneFOneB,
)

BAR = 0.05
POLICIES = {
    "none": NoCheckpointing(),
    "full": FullCheckpointing(),
    "selective_layer": SelectiveLayer(every=2),
    "selective_op": SelectiveOp(),
    "selective_op, all matmuls": SelectiveOp(every_other_matmul=False),
}
SCHEDULES = {
    "1f1b": OneFOneB(),
    "interleaved_1f1b": Interleaved1F1B(),
    "interleaved_zero_bubble": InterleavedZeroBubble(),
    "zbv": ZBV(),
    "dualpipe_v": DualPipeV(),
}
# Wide enough that what is kept for each block outweighs 5 kB of a random generator's state.
MODEL = {"dim": 128, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 448}


def log_probabilities(made):
    """Bytes that the loss keeps of a microbatch for its backward, an item of its own."""
    return LOG_PROBABILITY_BYTES * made.microbatch * made.training.seq_len * made.model.vocab_size


# In `make test`; the other policies are rows of the same product, and hold what they declare in tests/ac too.
QUICK = ("none", "selective_op")


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "policy", [pytest.param(policy, marks=[] if policy in QUICK else [pytest.mark.full]) for policy in POLICIES]
)
def test_a_step_on_a_cpu_keeps_what_is_planned(pool, tmp_path, policy, microbatches):
    made = tiny.recipe(
        tmp_path, **MODEL, seq_len=256, global_batch=2, microbatch=2 // microbatches, ac=POLICIES[policy]
    )
    (held,) = pool.run(1, allocated_before_backward, made)
    shape = (made.model, share_of(made), made.microbatch, made.training.seq_len)
    planned = saved_bytes(made.ac, *shape) + sum(edge_bytes(*shape).values())
    assert held - log_probabilities(made) == pytest.approx(planned, rel=BAR)


# In `make test`; the others are rows of the same product.
ALWAYS = (("zbv", "full"),)


@pytest.mark.parametrize(
    ("schedule", "policy"),
    [
        pytest.param(schedule, policy, marks=[] if (schedule, policy) in ALWAYS else [pytest.mark.full])
        for schedule in SCHEDULES
        for policy in ("none", "full", "selective_op")
    ],
)
def test_a_pipelines_ranks_keep_what_is_planned(pool, tmp_path, schedule, policy):
    made = tiny.recipe(tmp_path, **MODEL, pipeline=2, seq_len=128, global_batch=4, ac=POLICIES[policy])
    made = tiny.changed(made, schedule=SCHEDULES[schedule])
    placement = made.schedule.placement(ranks=2)
    for rank in memory(made):
        ((held,),) = (pool.run(1, most_between_actions, made, rank.rank),)
        planned, most = rank.items["activations"], rank.items["communication buffers"]
        # Messages are under way at that moment or not, and so are the log-probabilities of the last stage's loss.
        most += log_probabilities(made) if placement[-1] == rank.rank else 0
        assert planned * (1 - BAR) <= held <= (planned + most) * (1 + BAR), rank.rank


def test_between_its_halves_a_backward_keeps_the_factors_of_its_products():
    model = tiny.Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=256)
    tokens, share = 2 * 32, Share(element_bytes=2)
    found = deferred_bytes(model, share, 2, 32)
    # Inputs of q, k and v, of o, of gate and up, and of down; gradients of their outputs.
    assert found[""] == 2 * tokens * ((64 + 64 + 64 + 192) + (64 + 32 + 32 + 64) + (192 + 192 + 64))
    assert found["output"] == 2 * tokens * (64 + 256)
    assert found["tok_embeddings"] == found["norm"] == 0
    halved = deferred_bytes(model, Share(element_bytes=2, tensor=2), 2, 32)
    # Tensor parallelism cuts heads, columns and the vocabulary; what the products read and write in common is whole.
    assert halved[""] == 2 * tokens * ((64 + 32 + 64 + 96) + (32 + 16 + 16 + 64) + (96 + 96 + 64))


KINDS = sorted(kind for kind in discover()["schedule"] if kind != "csv")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_the_most_of_all_actions(kind):
    schedule = discover()["schedule"][kind].schema()
    stages = len(schedule.placement(ranks=4)) // 4
    for rank, order in enumerate(schedule.actions(ranks=4, microbatches=8)):
        states = in_flight(schedule, 4, 8, rank)
        assert max(sum(state) for state in states) / stages == peak_in_flight(order)


@pytest.mark.parametrize("kind", KINDS)
def test_many_microbatches_keep_what_all_actions_do(tmp_path, kind):
    """The actions of a few microbatches are looked at, and those of all count."""
    schedule = discover()["schedule"][kind].schema()
    made = tiny.recipe(tmp_path, pipeline=3, layers=12, global_batch=30, microbatch=1)
    found = memory(tiny.changed(made, schedule=schedule))
    with patch("titanlab.plan.memory.shorter", lambda ranks, microbatches: microbatches):
        assert memory(tiny.changed(made, schedule=schedule)) == found


def test_too_few_microbatches_are_the_schedules_error(tmp_path):
    made = tiny.recipe(tmp_path, pipeline=4, layers=8, global_batch=4, microbatch=1)
    with pytest.raises(ConfigError, match="at least 8 microbatches"):
        memory(dataclasses.replace(made, schedule=DualPipeV()))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"tensor": 4}, "none"),
        # The gathers of tensor parallelism are repeated, and what they return is not kept.
        ({"tensor": 4}, "selective_op, all matmuls"),
        ({"tensor": 2, "sequence_parallel": False}, "none"),
        ({"shard": 2, "tensor": 2}, "full"),
    ],
    ids=str,
)
def test_a_rank_of_tensor_parallelism_keeps_what_is_planned(tmp_path, given, policy):
    """Inputs of products that tensor parallelism gathers are kept whole, without checkpointing, and planned so."""
    made = tiny.recipe(tmp_path, **MODEL, **given, seq_len=256, global_batch=4, microbatch=2, ac=POLICIES[policy])
    shape = (made.model, share_of(made), made.microbatch, made.training.seq_len)
    planned = saved_bytes(made.ac, *shape) + sum(edge_bytes(*shape).values())
    planned += log_probabilities(made) // made.layout.tensor
    if made.layout.shard > 1:
        pieces = stored_pieces(made.model, made.precision, made.optimizer, made.layout.tensor, made.layout.fsdp)
        planned += sum(own.gathered for name, own in pieces.items() if name not in map("layers.{}".format, range(7)))
    assert 0 <= allocated_at(made, "backward")[0] - planned < 32 * 1024

"""What the communication of a recipe's step depends on."""

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.costs import Repeats
from titanlab.recipe import repeats_in_block, step_of
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveOp
from titanlab.techniques.precision.cast_schema import Fp32

BLOCKS = [f"layers.{number}" for number in range(6)]


def recipe(**given):
    return made(model=SMALL, seq_len=64, batch=8, **given)


def test_without_a_pipeline_one_stage_has_all():
    step = step_of(recipe(shard=2))
    assert (step.stages, step.placement, step.orders, step.repeats) == ([], [0], [], {})
    assert (step.seq_len, step.microbatch, step.microbatches) == (64, 4, 1)
    assert (step.layout.shard, step.account.layers, step.accelerator) == (2, 6, "cuda")


@pytest.mark.parametrize(
    ("precision", "expected"), [(None, (2, 4, 4, True)), (Fp32(), (4, 4, 4, False))], ids=["bf16", "fp32"]
)
def test_elements_have_the_bytes_of_the_precision(precision, expected):
    step = step_of(recipe(shard=2, precision=precision))
    assert (step.compute_bytes, step.reduce_bytes, step.master_bytes, step.mixed) == expected


def test_a_pipeline_has_stages_and_their_actions_in_order():
    step = step_of(recipe(pipeline=2, microbatch=4))
    assert step.stages == [
        ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        ("layers.3", "layers.4", "layers.5", "norm", "output"),
    ]
    assert step.placement == [0, 1]
    assert step.orders == [["F", "F", "B", "B"], ["F", "B", "F", "B"]]


def test_an_account_of_some_pieces_is_one_stage_that_repeats_nothing():
    full = recipe(pipeline=2, tensor=2, ac=FullCheckpointing())
    assert step_of(full).repeats
    part = step_of(full, account=SMALL.account())
    assert (part.stages, part.placement, part.orders, part.repeats) == ([], [0], [], {})


@pytest.mark.parametrize("parallelism", [{}, {"shard": 4}, {"pipeline": 2}, {"replicate": 2}])
def test_without_tensors_or_contexts_that_are_split_nothing_is_repeated(parallelism):
    assert step_of(recipe(ac=FullCheckpointing(), **parallelism)).repeats == {}


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ({"tensor": 2}, Repeats(gathers=True, sums=True, context=True)),
        ({"context": 2}, Repeats(gathers=True, sums=True, context=True)),
    ],
)
def test_a_block_that_is_recomputed_repeats_all(parallelism, expected):
    assert step_of(recipe(ac=FullCheckpointing(), **parallelism)).repeats == dict.fromkeys(BLOCKS, expected)


def test_a_block_that_is_kept_repeats_nothing():
    assert step_of(recipe(tensor=2, ac=NoCheckpointing())).repeats == {}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_a_block_repeats_is_that_of_the_whole_step(compiled, sequence_parallel):
    for ac in (NoCheckpointing(), FullCheckpointing(), SelectiveOp()):
        own = recipe(tensor=2, ac=ac, compiled=compiled, sequence_parallel=sequence_parallel)
        repeats = step_of(own).repeats
        for number, block in enumerate(BLOCKS):
            whole = repeats.get(block, Repeats())
            assert repeats_in_block(own, ac, number) == (whole.gathers, whole.sums)

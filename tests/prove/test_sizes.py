"""Sizes of reduced recipes: the least that layouts, schedules and precisions need."""

import math
from dataclasses import replace

import pytest

from tests.prove.test_proof import large
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.prove.reduction import Folded, common_sizes, fold_recipe
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8Tensorwise
from titanlab.techniques.schedule.published_schema import DualPipeV, GPipe, Interleaved1F1B


def folded(runs, *, most=16, precision=None, **given):
    recipe = large(runs, **given).recipe
    if precision is not None:
        recipe = replace(recipe, precision=precision)
    return fold_recipe("run", recipe, most=most)


def sizes_of(runs, **given):
    return common_sizes(folded(runs, **given)[:1])


def test_one_process_needs_least(tmp_path):
    sizes = sizes_of(tmp_path)
    model = sizes.model
    assert (model.layers, model.kv_heads, model.vocab_size) == (2, 2, 256)
    assert model.heads * model.head_dim >= 64
    assert model.head_dim % 2 == 0
    assert model.ffn_dim == 2 * model.heads * model.head_dim
    assert (sizes.seq_len, sizes.global_batch) == (32, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"shard": 8},
        {"tensor": 4},
        {"shard": 2, "tensor": 4},
        {"context": 4, "tensor": 2},
        {"pipeline": 4, "microbatch": 1},
        {"shard": 3, "global_batch": 12},
    ],
)
def test_every_size_can_be_cut_by_the_layout(tmp_path, given):
    sizes, layout = sizes_of(tmp_path, **given), Layout(**{k: v for k, v in given.items() if k in Layout().degrees()})
    model = sizes.model
    assert model.kv_heads % layout.tensor == 0
    assert model.heads % model.kv_heads == 0
    assert model.ffn_dim % (layout.tensor * layout.fsdp) == 0
    assert sizes.seq_len % (2 * layout.context) == sizes.seq_len % (layout.context * layout.tensor) == 0
    assert sizes.global_batch % layout.data == 0
    assert model.layers >= layout.pipeline


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, 2),
        ({"pipeline": 2, "microbatch": 1}, 4),
        ({"pipeline": 4, "microbatch": 1}, 4),
        ({"pipeline": 2, "microbatch": 1, "pipeline_schedule": Interleaved1F1B(stages_per_rank=4)}, 8),
    ],
)
def test_each_stage_has_a_block_and_few_stages_have_two(tmp_path, given, layers):
    assert sizes_of(tmp_path, **given).model.layers == layers


def test_very_many_stages_are_refused(tmp_path):
    given = {"pipeline": 2, "microbatch": 1, "layers": 80, "pipeline_schedule": Interleaved1F1B(stages_per_rank=40)}
    with pytest.raises(ConfigError, match="schedule=interleaved_1f1b: makes 80 stages of 2 ranks, each of which needs"):
        sizes_of(tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "microbatches"),
    [
        # Accumulation stays accumulation, of two.
        ({"global_batch": 16}, 1),
        ({"global_batch": 16, "microbatch": 1}, 2),
        ({"global_batch": 16, "microbatch": 8}, 2),
        # Two for each rank of a pipeline, if there are so many.
        ({"pipeline": 4, "microbatch": 1}, 8),
        ({"pipeline": 4, "microbatch": 4}, 4),
        ({"pipeline": 4, "microbatch": 8, "pipeline_schedule": GPipe()}, 2),
        ({"pipeline": 4, "microbatch": 1, "global_batch": 64, "pipeline_schedule": DualPipeV()}, 8),
    ],
)
def test_microbatches_are_few_and_as_many_as_the_schedule_needs(tmp_path, given, microbatches):
    assert folded(tmp_path, **given)[0].microbatches == microbatches


def test_products_in_8_bits_need_multiples(tmp_path):
    plain = sizes_of(tmp_path, tensor=2).model
    for precision in (Float8Rowwise(), Float8Tensorwise()):
        model = sizes_of(tmp_path, tensor=2, precision=precision).model
        assert model.unit % 16 == 0
        assert model.kv_heads * model.head_dim // 2 % 16 == model.ffn_dim // 2 % 16 == 0
    assert plain.unit == 2
    # Weights that are gathered in float8 are cut into equal parts, too.
    assert sizes_of(tmp_path, shard=3, global_batch=12, precision=Float8Tensorwise()).model.unit % 48 == 0


def test_a_vocabulary_that_the_ranks_cannot_cut_stays_uneven(tmp_path):
    even = sizes_of(tmp_path, tensor=4).model.vocab_size
    uneven = sizes_of(tmp_path, tensor=4, vocab_size=128255).model.vocab_size
    assert (even % 4, uneven) == (0, even + 1)


def test_recipes_that_are_compared_share_sizes_that_fit_each(tmp_path):
    group = [*folded(tmp_path, tensor=4), *folded(tmp_path, shard=3, global_batch=12), *folded(tmp_path, context=4)]
    sizes = common_sizes(group)
    assert sizes.model.kv_heads % 4 == 0
    assert sizes.model.unit % 3 == 0
    assert sizes.seq_len % 8 == 0
    assert sizes.global_batch % math.lcm(*(case.layout.data * case.microbatches for case in group)) == 0


def test_a_schedule_for_so_many_ranks_keeps_them(tmp_path):
    recipe = large(tmp_path, pipeline=4, microbatch=1).recipe

    class Fixed(GPipe):
        def fixed_size(self):
            return 4, 16

    recipe = replace(recipe, schedule=Fixed(), parallelism=replace(recipe.parallelism, shard=4))
    cases = fold_recipe("run", recipe, most=8)
    assert {case.layout.pipeline for case in cases} == {4}
    assert cases[0].microbatches == recipe.microbatches == 4


def test_inductor_is_kept_if_it_is_wanted(tmp_path):
    recipe = large(tmp_path).recipe
    assert fold_recipe("run", recipe, most=4) == [Folded(run="run", recipe=recipe, layout=recipe.layout)]
    assert fold_recipe("run", recipe, most=4, inductor=True)[0].inductor

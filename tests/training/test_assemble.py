"""Assembly: one function for a step's forward and backward, whatever the layout."""

import os

import pytest
import torch

from tests import tiny
from titanlab.data.source import Batch
from titanlab.distributed.mesh import build_mesh
from titanlab.distributed.ranks import joined
from titanlab.distributed.world import open_world
from titanlab.parallelism.loss import IGNORE
from titanlab.training.assemble import assemble


def batch():
    tokens = torch.arange(4 * 32).view(4, 32) % tiny.VOCABULARY
    labels = tokens.roll(-1, dims=1)
    labels[1, 3:9] = IGNORE
    return Batch(tokens.numpy(), labels.numpy())


def stepped(made):
    """Loss, tokens and norm of the gradient of a step; loss and tokens of an evaluation of three sequences; positions."""
    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        assembled.after_update()
        here = assembled.to_device(batch())
        sums = assembled.forward_backward(here)
        assembled.after_first_step()
        norm = torch.stack([p.grad.norm() for p in assembled.model.parameters()]).norm()
        few = min(3, assembled.evaluation_rows)
        part = assembled.to_device(Batch(*(rows[:few] for rows in batch())))
        evaluated = assembled.evaluate(part)
        return (
            (float(sums.loss_sum), sums.tokens, float(norm)),
            (float(evaluated.loss_sum), evaluated.tokens),
            here.tokens[0].tolist(),
        )


def test_microbatches_add_up(pool, tmp_path):
    [(whole, _, _)] = pool.run(1, stepped, tiny.recipe(tmp_path, global_batch=4))
    [(apart, (loss, tokens), _)] = pool.run(1, stepped, tiny.recipe(tmp_path, global_batch=4, microbatch=2))
    assert whole[1] == apart[1] == 4 * 32 - 6
    assert apart == pytest.approx(whole, rel=1e-5)
    assert tokens == 2 * 32 - 6
    assert 0 < loss < whole[0]


def test_ranks_of_a_context_have_parts_of_the_same_sequences(pool, tmp_path):
    [(alone, _, whole)] = pool.run(1, stepped, tiny.recipe(tmp_path, global_batch=4))
    first, second = pool.run(2, stepped, tiny.recipe(tmp_path, global_batch=4, context=2))
    assert sorted(first[2] + second[2]) == sorted(whole)
    assert first[0][0] + second[0][0] == pytest.approx(alone[0], rel=1e-5)
    assert first[0][1] + second[0][1] == alone[1]


def test_one_of_the_ranks_with_the_same_loss_answers_for_it(pool, tmp_path):
    [(alone, evaluated, _)] = pool.run(1, stepped, tiny.recipe(tmp_path, global_batch=4))
    for layout in ({"tensor": 2}, {"pipeline": 2, "microbatch": 2}):
        ranks = pool.run(2, stepped, tiny.recipe(tmp_path, global_batch=4, **layout))
        answers = [rank for rank in ranks if rank[0][1]]
        assert [rank[0][0] for rank in ranks if not rank[0][1]] == [0.0]
        assert answers[0][0][:2] == pytest.approx(alone[:2], rel=1e-5)
        assert answers[0][1] == pytest.approx(evaluated, rel=1e-5)

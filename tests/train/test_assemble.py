"""Assembly: one function for a step's forward and backward, whatever the layout."""

import os

import numpy as np
import pytest
import torch

from tests import tiny
from titanlab.data import Batch, Synthetic
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.parallelism import IGNORE
from titanlab.train.assemble import assemble


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


def documents_of(made):
    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        tokens = np.arange(4 * 32).reshape(4, 32) % 5
        found = assemble(made, world, build_mesh(made.layout, "cpu")).to_device(Batch(tokens, tokens)).documents
        return found.positions.tolist(), found.starts.tolist()


def test_positions_restart_with_each_document(pool, tmp_path):
    """With rotary positions no logits would show it: they depend on distances alone."""
    data = Synthetic(vocab_size=256, document_mask=True)
    [(positions, starts)] = pool.run(1, documents_of, tiny.recipe(tmp_path, global_batch=4, data=data))
    # Token 0 ends a document: of the first sequence the first, sixth, … token.
    assert positions[0] == [0, *([0, 1, 2, 3, 4] * 7)[:31]]
    assert positions[1] == [0, 1, 2, 3, *([0, 1, 2, 3, 4] * 6)[:28]]
    assert [a + b for a, b in zip(positions[3], starts[3], strict=True)] == list(range(32))
    parts = pool.run(2, documents_of, tiny.recipe(tmp_path, global_batch=4, data=data, context=2))
    for row in range(4):
        # Of two ranks the first has the chunks at both ends.
        first, second = (part[0][row] for part in parts)
        assert first[:8] + second + first[8:] == positions[row]
        first, second = (part[1][row] for part in parts)
        assert first[:8] + second + first[8:] == starts[row]

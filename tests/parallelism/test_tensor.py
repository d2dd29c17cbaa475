"""What tensor parallelism cuts and holds, and its loss; that it trains right is shown by the parity matrix."""

import math
import os
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import tiny
from titanlab.data import Batch
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.parallelism import IGNORE, Columns, SplitLoss, loss_sum, of_logits
from titanlab.train.assemble import assemble


def placements_of(made):
    """Placements and dtypes of parameters and their gradients after a step, and the widest logits that a rank made."""
    widths = []
    whole = F.linear

    def watched(tensor, weight, bias=None):
        output = whole(tensor, weight, bias)
        widths.append(output.shape[-1])
        return output

    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        tokens = torch.zeros(made.local_batch, made.training.seq_len, dtype=torch.int64).numpy()
        with patch.object(F, "linear", watched):
            assembled.forward_backward(assembled.to_device(Batch(tokens, tokens)))
        found = {}
        for name, parameter in assembled.model.named_parameters():
            assert isinstance(parameter.data, DTensor)
            assert parameter.grad.placements == parameter.data.placements
            assert parameter.grad.to_local().shape == parameter.data.to_local().shape
            found[name] = parameter.data.placements
    return found, max(widths)


def test_matrices_and_their_gradients_are_cut_and_logits_never_whole(pool, tmp_path):
    made = tiny.recipe(tmp_path, tensor=2, vocab_size=1000)
    for found, widest in pool.run(2, placements_of, made):
        rows = {name for name, placements in found.items() if placements == (Shard(0),)}
        columns = {name for name, placements in found.items() if placements == (Shard(1),)}
        assert {name.rpartition("layers.")[2] for name in columns} == {
            f"{layer}.{name}.weight" for layer in range(2) for name in ("attention.wo", "feed_forward.w2")
        }
        assert {"tok_embeddings.weight", "output.weight", "layers.0.attention.wk.weight"} <= rows
        assert {placements for name, placements in found.items() if "norm" in name} == {(Replicate(),)}
        assert widest == 500


def split_loss(vocab_size, seed):
    """(loss, gradient of this rank's columns) with the vocabulary split, and of the whole."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    whole = (30 * torch.randn(3, 7, vocab_size, generator=generator)).requires_grad_()
    labels = torch.randint(0, vocab_size, (3, 7), generator=generator)
    # In the second row no label counts.
    labels[0, :4] = labels[1] = IGNORE
    mine = whole.detach().chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    loss, expected = SplitLoss(Columns.of(dist.group.WORLD, vocab_size))(mine, labels), loss_sum(whole, labels)
    (0.5 * loss).backward()
    (0.5 * expected).backward()
    error = (mine.grad - whole.grad.chunk(ranks, dim=-1)[rank]).abs().max().item()
    return loss.item(), expected.item(), error


@pytest.mark.parametrize(("ranks", "vocab_size"), [(2, 64), (2, 65), (3, 64), (3, 7)])
def test_the_loss_of_split_logits_is_that_of_whole_ones(pool, ranks, vocab_size):
    for loss, expected, error in pool.run(ranks, split_loss, vocab_size, ranks):
        assert loss == pytest.approx(expected, rel=1e-6)
        # Slopes lie between -1 and 1. Logits reach 100, where exponentials overflow and numbers are 2^-17 apart.
        assert error < 2**-17


@pytest.mark.parametrize(("vocabulary", "ranks"), [(8, 4), (10, 4), (10, 3), (5, 4), (3, 1)])
def test_columns_are_split_as_dtensor_splits_them(vocabulary, ranks):
    groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks) for rank in range(ranks)]
    firsts = [Columns.of(group, vocabulary).first for group in groups]
    parts = torch.arange(vocabulary).chunk(ranks)
    assert firsts == [int(part[0]) for part in parts] + [vocabulary] * (ranks - len(parts))


def test_logits_of_16_bits_are_summed_in_float32_and_freed_when_the_loss_is_known():
    kept = []

    def compute():
        logits = torch.tensor([[[0.0, 0.25]]], dtype=torch.bfloat16)
        kept.append(weakref.ref(logits))
        return logits

    loss = of_logits(loss_sum)(compute, torch.tensor([[0]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(0.25)), rel=1e-6)
    assert kept[0]() is None

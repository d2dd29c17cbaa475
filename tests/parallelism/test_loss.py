"""The loss of whole logits, and of columns that ranks have: computed rank by rank in this process."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from titanlab.parallelism import IGNORE, SplitLoss, loss_sum, of_logits
from titanlab.parallelism.loss import _own, _slope, _whole


def test_the_loss_is_a_sum_over_labels_that_count():
    logits = torch.zeros(1, 3, 4)
    assert loss_sum(logits, torch.tensor([[0, 1, 2]])).item() == pytest.approx(3 * math.log(4))
    assert loss_sum(logits, torch.tensor([[0, IGNORE, 2]])).item() == pytest.approx(2 * math.log(4))
    assert loss_sum(logits, torch.full((1, 3), IGNORE)).item() == 0


def test_logits_of_16_bits_are_summed_in_float32():
    logits = torch.tensor([[[0.0, 0.25]]], dtype=torch.bfloat16)
    loss = loss_sum(logits, torch.tensor([[0]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(0.25)), rel=1e-6)


def test_logits_are_freed_when_the_loss_is_known():
    kept = []

    def compute():
        logits = torch.zeros(1, 2, 4)
        kept.append(weakref.ref(logits))
        return logits

    loss = of_logits(lambda logits, labels: logits.sum() + labels.sum())
    assert loss(compute, torch.ones(1, 2)).item() == 2
    assert kept[0]() is None


def split(logits, labels, sizes):
    """Total loss on each rank, and the gradient of all columns, as ranks with so many columns compute them."""
    parts, firsts = logits.split(sizes, dim=1), [sum(sizes[:rank]) for rank in range(len(sizes))]
    own = [_own(part, labels, first) for part, first in zip(parts, firsts, strict=True)]
    gathered = torch.cat([sent for *_, sent in own])
    totals, slopes = [], []
    for log_probabilities, mine, column, sent in own:
        total, shift, valid = _whole(gathered, sent[0], labels)
        totals.append(total)
        slopes.append(_slope(torch.tensor(2.0), log_probabilities, shift, column, mine, valid))
    return totals, torch.cat(slopes, dim=1)


@pytest.mark.parametrize("sizes", [[10], [5, 5], [4, 4, 2], [9, 1]])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_ranks_with_some_columns_compute_the_loss_of_all(sizes, scale):
    torch.manual_seed(0)
    logits = (scale * torch.randn(6, 10)).requires_grad_()
    labels = torch.tensor([0, 9, 4, IGNORE, 5, 8])
    expected = loss_sum(logits.unsqueeze(0), labels.unsqueeze(0))
    (gradient,) = torch.autograd.grad(2 * expected, logits)
    totals, slope = split(logits.detach(), labels, sizes)
    # Sums of float32 in another order.
    torch.testing.assert_close(torch.stack(totals), expected.detach().expand(len(sizes)), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(slope, gradient, rtol=1e-5, atol=1e-6)
    assert not slope[3].any()


def test_without_labels_that_count_loss_and_gradient_are_zero():
    totals, slope = split(torch.randn(3, 8), torch.full((3,), IGNORE), [4, 4])
    assert [total.item() for total in totals] == [0, 0]
    assert not slope.any()


class Group:
    """A rank of a group, without the others."""

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return self._ranks


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "firsts"), [(8, 4, [0, 2, 4, 6]), (10, 4, [0, 3, 6, 9]), (5, 4, [0, 2, 4, 5]), (3, 1, [0])]
)
def test_columns_are_split_as_dtensor_splits_them(vocabulary, ranks, firsts):
    assert [SplitLoss(Group(rank, ranks), vocab_size=vocabulary).first for rank in range(ranks)] == firsts
    parts = torch.arange(vocabulary).chunk(ranks)
    assert [int(part[0]) for part in parts] == firsts[: len(parts)]


def test_all_three_functions_are_compiled():
    compiled = []
    loss = SplitLoss(Group(0, 2), vocab_size=4, compiled=lambda function: compiled.append(function) or function)
    assert list(loss.parts) == compiled == [_own, _whole, _slope]

"""Attention of one rank's two chunks, in parts: all ranks together compute what one process does."""

from __future__ import annotations

import pytest
import torch

from titanlab.parallelism.head_tail import (
    KeysAndValues,
    accumulator,
    backward,
    forward,
    halves,
    joined_halves,
    merge,
    owned,
)


class Softmax:
    """A kernel that computes attention by its definition."""

    def forward(self, q, k, v, *, causal):
        scores = self.scores(q, k, causal=causal)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def backward(self, grad, q, k, v, out, lse, *, causal):
        shares = (self.scores(q, k, causal=causal) - lse.unsqueeze(-1)).exp()
        slope = shares * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return slope @ k, slope.mT @ q, shares.mT @ grad

    @staticmethod
    def scores(q, k, *, causal):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return (
            scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            if causal
            else scores
        )


class Others:
    """The keys and values of other ranks, in this process; notes where their gradients go."""

    def __init__(self, rank, ranks, pairs):
        self.rank, self.ranks, self.pairs = rank, ranks, pairs
        self.returned = {}

    def blocks(self):
        for other in range(self.ranks):
            if other == self.rank:
                continue
            self.latest = other
            later = other > self.rank
            k, v = self.pairs[other]
            half = k.shape[1] // 2
            # Of an earlier rank only its head comes before this rank's rows; of a later one all comes before the tail.
            yield (
                KeysAndValues(k, v, True, owned(other, self.ranks))
                if later
                else KeysAndValues(k[:, :half], v[:, :half], False, owned(other, self.ranks)[:1])
            )

    def give(self, gradients, into):
        self.returned[self.latest] = gradients

    def collect(self, into):
        return


def rows_of(rank, ranks, seq):
    chunk = seq // (2 * ranks)
    return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in owned(rank, ranks)])


@pytest.mark.parametrize(("rank", "ranks", "chunks"), [(0, 1, (0, 1)), (0, 4, (0, 7)), (3, 4, (3, 4))])
def test_a_rank_has_a_chunk_of_each_end(rank, ranks, chunks):
    assert owned(rank, ranks) == chunks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_compute_what_one_process_does(ranks):
    seq, kernel = 12, Softmax()
    torch.manual_seed(ranks)
    q, k, v, grad = (torch.randn(2, seq, 3, 4, dtype=torch.float64) for _ in range(4))
    whole_out, whole_lse = (
        x.transpose(1, 2) for x in kernel.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    )
    given = [x.transpose(1, 2) for x in (grad, q, k, v, whole_out, whole_lse)]
    expected = [x.transpose(1, 2) for x in kernel.backward(*given, causal=True)]
    rows = [rows_of(rank, ranks, seq) for rank in range(ranks)]
    pairs = [(k[:, own], v[:, own]) for own in rows]
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for rank, own in enumerate(rows):
        out, lse = forward(Others(rank, ranks, pairs), q[:, own], *pairs[rank], kernel)
        # Two ways to sum in 64 bits.
        torch.testing.assert_close(out, whole_out[:, own], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, whole_lse[:, own].contiguous(), rtol=1e-12, atol=1e-12)
        others = Others(rank, ranks, pairs)
        parts = backward(others, grad[:, own], q[:, own], *pairs[rank], out, lse, kernel)
        for total, part in zip(gradients, parts, strict=True):
            total[:, own] += part
        for other, returned in others.returned.items():
            for total, part in zip(gradients[1:], returned, strict=True):
                total[:, rows[other][: part.shape[1]]] += part
    torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-11)


def test_halves_are_sequences_of_their_own():
    x = torch.arange(2 * 4 * 3).view(2, 4, 3)
    parts = halves(x)
    assert parts.shape == (4, 2, 3)
    assert torch.equal(parts[1], x[0, 2:])
    assert parts.data_ptr() == x.data_ptr()
    assert torch.equal(joined_halves(parts, 2), x)
    assert joined_halves(parts.transpose(0, 1).contiguous().transpose(0, 1), 2).is_contiguous()


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_parts_are_merged_by_their_denominators(offset):
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) + offset
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)

    def part(chosen):
        out = (scores[chosen].softmax(0) @ values[chosen]).view(1, 1, 1, 1)
        return out, scores[chosen].logsumexp(0).view(1, 1, 1)

    out, lse = part(slice(0, 1))
    merge(out, lse, *part(slice(1, 4)))
    expected = part(slice(0, 4))
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_no_weight_changes_nothing():
    out, lse = torch.tensor([[[[3.0]]]]), torch.tensor([[[0.0]]])
    merge(out, lse, torch.tensor([[[[7.0]]]]), torch.tensor([[[-torch.inf]]]))
    assert (out.item(), lse.item()) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_have_at_least_32_bits(dtype, sums):
    assert accumulator(dtype) == sums

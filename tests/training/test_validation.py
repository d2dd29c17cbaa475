"""The validation loss: of all held-out sequences, by label, over all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.one_process import ALONE
from titanlab.train import train
from titanlab.train.train import validate

# Of each sequence: the sum of the losses of its labels, and how many of them count.
LOSSES = [(8.0, 4), (6.0, 2), (1.0, 1), (30.0, 3), (0.0, 0)]
RECIPE = SimpleNamespace(
    data="the data",
    training=SimpleNamespace(seq_len=4, validation_sequences=100),
    layout=SimpleNamespace(data=3),
)
MESH = SimpleNamespace(data_rank=2)


class Evaluated:
    """A model whose loss is written in its tokens; notes the numbers of sequences and whether it trains."""

    def __init__(self, rows):
        self.model, self.evaluation_rows, self.seen = nn.Dropout(), rows, []

    def to_device(self, batch):
        assert batch.tokens.shape == batch.labels.shape == (len(batch.tokens), 4)
        return torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)

    def evaluate(self, batch):
        tokens, labels = batch
        self.seen.append((len(tokens), self.model.training))
        return SimpleNamespace(loss_sum=tokens[:, 0].float().sum(), tokens=labels[:, 0].sum())


@pytest.fixture
def asked(monkeypatch):
    """What the data are asked for."""
    calls = []

    def open_validation(data, **given):
        calls.append((data, given))
        return [(np.full(4, loss, np.int64), np.full(4, count, np.int64)) for loss, count in LOSSES]

    monkeypatch.setattr(train.source, "open_validation", open_validation)
    return calls


@pytest.mark.parametrize(("rows", "batches"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (8, [5])])
def test_it_is_the_mean_over_labels_however_sequences_are_batched(asked, rows, batches):
    assembled = Evaluated(rows)
    assert validate(RECIPE, assembled, ALONE, MESH) == 45 / 10
    assert [count for count, _ in assembled.seen] == batches


def test_the_model_is_evaluated_and_then_trains_on(asked):
    assembled = Evaluated(2)
    validate(RECIPE, assembled, ALONE, MESH)
    assert not any(training for _, training in assembled.seen)
    assert assembled.model.training


def test_a_rank_reads_its_part_of_the_sequences(asked):
    validate(RECIPE, Evaluated(2), ALONE, MESH)
    assert asked == [("the data", {"seq_len": 4, "sequences": 100, "rank": 2, "ranks": 3})]


def test_sums_and_not_means_are_added_over_ranks(asked):
    """The losses of another rank's 90 labels sum to 90."""

    def add(sums):
        assert sums.dtype == torch.float64
        return sums.add_(torch.tensor([90.0, 90.0]))

    assert validate(RECIPE, Evaluated(2), SimpleNamespace(sum=add), MESH) == (45 + 90) / 100

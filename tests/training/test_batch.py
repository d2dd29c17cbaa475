"""A rank's share of a batch: its tokens, its labels that count, and the positions of both."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import tiny
from tests.checkpoint.one_process import ALONE
from titanlab.data import Batch
from titanlab.parallelism import IGNORE
from titanlab.techniques.model.documents import Packed
from titanlab.train import StepBatch
from titanlab.train import assemble as module
from titanlab.train.assemble import positions_of, to_device_of


def on(rank):
    """A mesh whose context axis has this rank."""
    return SimpleNamespace(coordinate=lambda axis: {"context": rank}[axis])


def batch(rows=2, seq=32):
    tokens = np.arange(rows * seq, dtype=np.int64).reshape(rows, seq)
    labels = tokens + 1
    labels[0, :3] = labels[1, -1] = IGNORE
    return Batch(tokens, labels)


def test_without_context_parallelism_a_rank_has_the_sequence(tmp_path):
    recipe = tiny.recipe(tmp_path)
    assert positions_of(recipe, ALONE, on(0)).tolist() == list(range(32))
    given = batch()
    taken = to_device_of(recipe, ALONE, on(0), reports_loss=True)(given)
    assert taken.tokens.tolist() == given.tokens.tolist()
    assert taken.labels.tolist() == given.labels.tolist()
    assert (taken.valid, taken.documents) == (60, None)


def test_ranks_of_the_context_axis_share_a_sequence_without_rest(tmp_path):
    recipe = tiny.recipe(tmp_path, context=2)
    given, shares = batch(), []
    for rank in (0, 1):
        share = to_device_of(recipe, ALONE, on(rank), reports_loss=True)(given)
        positions = positions_of(recipe, ALONE, on(rank))
        # Tokens, labels and positions are of the same places.
        assert torch.equal(share.tokens[0], positions)
        counted = share.labels != IGNORE
        assert torch.equal(share.labels[counted], share.tokens[counted] + 1)
        assert share.valid == counted.sum()
        shares.append(share)
    assert sorted(torch.cat([share.tokens for share in shares], 1).flatten().tolist()) == list(range(64))
    assert sum(share.valid for share in shares) == 60


def test_a_rank_whose_loss_another_reports_counts_none(tmp_path):
    share = to_device_of(tiny.recipe(tmp_path), ALONE, on(0), reports_loss=False)(batch())
    assert share.valid == 0
    assert share.labels.shape == (2, 32)


def test_labels_that_all_do_not_count_are_none(tmp_path):
    given = batch()
    given.labels[:] = IGNORE
    assert to_device_of(tiny.recipe(tmp_path), ALONE, on(0), reports_loss=True)(given).valid == 0


@pytest.mark.parametrize("context", [1, 2])
def test_positions_in_documents_restart_and_their_starts_are_those_of_the_whole_sequence(
    tmp_path, monkeypatch, context
):
    starts = np.array([[0] * 10 + [10] * 22, [0] * 32])
    asked = []
    separators = SimpleNamespace(starts=lambda tokens: asked.append(tokens.shape) or starts)
    monkeypatch.setattr(module.source, "separators", lambda data: separators)
    recipe = tiny.recipe(tmp_path, context=context)
    recipe = replace(recipe, data=replace(recipe.data, document_mask=True))
    chosen = positions_of(recipe, ALONE, on(context - 1))
    documents = to_device_of(recipe, ALONE, on(context - 1), reports_loss=True)(batch()).documents
    assert isinstance(documents, Packed)
    whole = torch.arange(32) - torch.from_numpy(starts)
    assert documents.positions.tolist() == whole[:, chosen].tolist()
    assert documents.starts.tolist() == starts[:, chosen].tolist()
    assert documents.stays_on_host is (context > 1)
    # Documents are found in whole sequences: a rank's part has gaps.
    assert asked == [(2, 32)]


def test_a_model_gets_positions_or_documents():
    positions = torch.arange(4)
    assert StepBatch(None, None, 0).places(slice(0, 1), positions) == (positions,)
    documents = Packed(torch.arange(8).view(2, 4), torch.zeros(2, 4, dtype=torch.int64))
    places = StepBatch(None, None, 0, documents).places(slice(1, 2), positions)
    assert places[0].tolist() == [[4, 5, 6, 7]]

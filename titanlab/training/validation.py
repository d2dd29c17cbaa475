"""Validation: the loss of held-out sequences."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from titanlab.data import source
from titanlab.distributed.mesh import Mesh
from titanlab.distributed.world import World
from titanlab.recipe.recipe import Recipe
from titanlab.training.assemble import Assembled


def validate(recipe: Recipe, assembled: Assembled, world: World, mesh: Mesh) -> float:
    """Mean cross-entropy over the held-out sequences; every rank has the same number of batches."""
    assembled.model.eval()
    rows = iter(
        source.open_validation(
            recipe.data,
            seq_len=recipe.training.seq_len,
            sequences=recipe.training.validation_sequences,
            rank=mesh.data_rank,
            ranks=recipe.layout.data,
        )
    )
    sums = torch.zeros(2, dtype=torch.float64)
    while batch := list(itertools.islice(rows, assembled.evaluation_rows)):
        tokens, labels = (np.stack(column) for column in zip(*batch, strict=True))
        part = assembled.evaluate(assembled.to_device(source.Batch(tokens, labels)))
        sums += torch.tensor([float(part.loss_sum), float(part.tokens)], dtype=torch.float64)
    world.sum(sums)
    assembled.model.train()
    return float(sums[0] / sums[1])

"""One rank's share of a batch on its device: tokens, labels, and where documents begin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from titanlab.data import source
from titanlab.data.source import Batch
from titanlab.distributed.mesh import Mesh
from titanlab.distributed.world import World
from titanlab.model.documents.packed import HostStarts, Packed
from titanlab.parallelism.context import positions
from titanlab.parallelism.loss import IGNORE
from titanlab.recipe.recipe import Recipe


class StepBatch(NamedTuple):
    """One rank's share of a step, on its device.

    tokens: [sequences, seq of this rank] int64
    labels: [sequences, seq of this rank] int64; -100 does not count
    valid: number of labels that count; 0 on ranks whose loss another rank reports
    documents: of document masks, of this rank's part of the sequences
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    valid: int
    documents: Packed | None = None

    def places(self, rows: slice, positions: torch.Tensor | None) -> tuple[torch.Tensor | HostStarts | None, ...]:
        """What a model gets of some sequences after their tokens; `positions` are those without document masks."""
        return (positions,) if self.documents is None else self.documents.arguments(rows)


def positions_of(recipe: Recipe, world: World, mesh: Mesh) -> torch.Tensor:
    """The positions of this rank's tokens in their sequence: [seq of this rank] int64."""
    layout, seq_len = recipe.layout, recipe.training.seq_len
    if layout.context == 1:
        return torch.arange(seq_len, device=world.device)
    return positions(seq_len, ranks=layout.context, rank=mesh.coordinate("context")).to(world.device)


def to_device_of(recipe: Recipe, world: World, mesh: Mesh, *, reports_loss: bool) -> Callable[[Batch], StepBatch]:
    """The function that copies this rank's part of a batch to its device."""
    chosen = positions_of(recipe, world, mesh).cpu() if recipe.layout.context > 1 else None
    documents = _document_finder(recipe, chosen, world) if recipe.data.document_mask else None

    def to_device(batch: Batch) -> StepBatch:
        tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
        if chosen is not None:
            tokens, labels = tokens[:, chosen], labels[:, chosen]
        valid = int((labels != IGNORE).sum()) if reports_loss else 0
        tokens, labels = _on_device(tokens, world), _on_device(labels, world)
        return StepBatch(tokens, labels, valid, None if documents is None else documents(batch))

    return to_device


def _document_finder(recipe: Recipe, chosen: torch.Tensor | None, world: World) -> Callable[[Batch], Packed]:
    """The function that finds the documents of this rank's tokens."""
    # The data need not exist yet: a trace of a step has none.
    separators = functools.cache(functools.partial(source.separators, recipe.data))

    def find(batch: Batch) -> Packed:
        starts = torch.from_numpy(separators().starts(batch.tokens))
        positions = torch.arange(starts.shape[1]) - starts
        if chosen is not None:
            return Packed(_on_device(positions[:, chosen], world), starts[:, chosen], stays_on_host=True)
        return Packed(_on_device(positions, world), _on_device(starts, world))

    return find


def _on_device(tensor: torch.Tensor, world: World) -> torch.Tensor:
    return tensor if world.device.type == "cpu" else tensor.pin_memory().to(world.device, non_blocking=True)

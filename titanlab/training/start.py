"""The state from which an attempt begins: the run's latest checkpoint, another run's, or given weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from titanlab.checkpoint import store
from titanlab.checkpoint.agreement import together
from titanlab.checkpoint.damage import DamagedCheckpoint
from titanlab.checkpoint.folders import fall_back, find, latest
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.distributed.world import World
from titanlab.recipe.recipe import Recipe
from titanlab.records.run_folder import RunFolder
from titanlab.weights.starting_weights import fill_start


def load_start(
    recipe: Recipe, run: RunFolder, attempt: int, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> tuple[Position, list[str]]:
    """Load the run's latest checkpoint, else the checkpoint or the weights that the recipe names.

    Returns:
        the position, and a line for each damaged checkpoint that was passed over.
    """
    warnings: list[str] = []
    # Rank 0 chooses, because hosts may see a new folder of a shared file system at different times.
    while (own := world.share(latest(checkpoints_of(run)) if world.logs else None)) is not None:
        try:
            return store.load(own, "run", model=model, optimizer=optimizer, world=world), warnings
        except DamagedCheckpoint as error:
            if world.share(run.has_chosen(attempt)):
                raise
            # Loading the older one replaces every value that was read from this one.
            damage = error
        warnings.append(together(world, lambda: fall_back(damage) if world.logs else ""))  # noqa: B023
    if recipe.checkpoint.load_from is not None:
        key = "checkpoint.load_from"
        position = store.load(
            find(recipe.checkpoint.load_from, key), key, model=model, optimizer=optimizer, world=world
        )
        # The checkpoint's tracker id belongs to the other run.
        return replace(position, tracker=None), warnings
    if recipe.init_from is not None:
        biases = fill_start(recipe, model)
        return Position(routing={name: list(block) for name, block in biases.items()}), warnings
    return Position(), warnings

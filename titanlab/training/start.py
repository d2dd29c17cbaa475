"""The state from which an attempt begins: the run's latest checkpoint, another run's, or given weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from titanlab.checkpoint import store
from titanlab.checkpoint.agreement import together
from titanlab.checkpoint.damage import DamagedCheckpoint, one_line
from titanlab.checkpoint.folders import another, fall_back, find, latest
from titanlab.checkpoint.position import POSITION, Position
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.distributed.world import World
from titanlab.errors import DamagedPosition
from titanlab.recipe.recipe import Recipe
from titanlab.records.run_folder import RunFolder
from titanlab.weights.starting_weights import fill_start

T = TypeVar("T")


def load_start(
    recipe: Recipe,
    run: RunFolder,
    attempt: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    restore: Callable[[Position], T],
) -> tuple[Position, T, list[str]]:
    """Load the run's latest checkpoint, else the checkpoint or the weights that the recipe names.

    Args:
        restore: sets up what goes on from the position; a `DamagedPosition` that it raises is damage of the checkpoint.

    Returns:
        the position, the result of `restore`, and a line for each damaged checkpoint that was passed over.
    """

    def loaded(folder: Place, key: str) -> tuple[Position, T]:
        position = store.load(folder, key, model=model, optimizer=optimizer, world=world)
        if key != "run":
            # The checkpoint's tracker id belongs to the other run.
            position = replace(position, tracker=None)
        return position, together(world, lambda: _restored(restore, position, folder, key))

    def chosen(choose: Callable[[], Place]) -> Place:
        # Rank 0 chooses here too: another run may save and remove checkpoints meanwhile.
        place = world.share(together(world, lambda: choose() if world.logs else None))
        assert place is not None
        return place

    warnings: list[str] = []
    # Rank 0 chooses, because hosts may see a new folder of a shared file system at different times.
    while (own := world.share(latest(checkpoints_of(run)) if world.logs else None)) is not None:
        try:
            return *loaded(own, "run"), warnings
        except DamagedCheckpoint as error:
            if world.share(run.has_chosen(attempt)):
                raise
            # Loading the older one replaces every value that was read from this one.
            damage = error
        warnings.append(together(world, lambda: fall_back(damage) if world.logs else ""))  # noqa: B023
    if recipe.checkpoint.load_from is not None:
        source, key = recipe.checkpoint.load_from, "checkpoint.load_from"
        return *loaded(chosen(lambda: find(source, key)), key), warnings
    position = Position()
    if recipe.init_from is not None:
        biases = fill_start(recipe, model, chosen)
        position = Position(routing={name: list(block) for name, block in biases.items()})
    return position, restore(position), warnings


def _restored(restore: Callable[[Position], T], position: Position, checkpoint: Place, key: str) -> T:
    try:
        return restore(position)
    except DamagedPosition as error:
        rule = f"its {POSITION} has {one_line(error.problem)}"
        raise DamagedCheckpoint(key, checkpoint, rule, another(checkpoint)) from error

"""What AsyncTP fuses in a recipe whose blocks are not compiled."""

from __future__ import annotations

from titanlab.costs.fused_layers import FusedLayers, fused_layers
from titanlab.costs.shard_account import account_for
from titanlab.recipe.recipe import Recipe


def fuses_in_eager_mode(recipe: Recipe) -> bool:
    """Whether titanlab fuses products with their collectives itself; in compiled blocks inductor does."""
    return recipe.parallelism.async_tensor and not recipe.compile.blocks


def eager_products(recipe: Recipe) -> FusedLayers:
    """The layers of a resolved recipe's model that AsyncTP fuses in eager mode."""
    account = account_for(recipe.model.account(), recipe.layout)
    return fused_layers(account, recipe.precision.products(account))

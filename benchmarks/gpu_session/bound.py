"""What the measured products and attention alone allow: the part of a step that no other work explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_session.prediction import flops_per_token
from gpu_session.products import products_of, seconds_of
from titanlab.recipe import Recipe


@dataclass(frozen=True)
class Bound:
    """The seconds of a step's products and attention, at the measured rates.

    Attributes:
        products, attention: seconds of a step.
        mfu_percent: if nothing else took time; None: the device's peak is not known.
    """

    products: float
    attention: float
    mfu_percent: float | None

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.products + self.attention


def bound_of(
    recipe: Recipe, measured: Mapping[str, Any], *, peak: float | None, layers: int | None = None
) -> Bound | None:
    """The bound of a recipe; None: a product of it, or its kernel of attention, was not measured.

    Args:
        measured: figures of the row `products/all`.
        layers: of the model; None: as the recipe has them.
    """
    products = seconds_of(products_of(recipe, layers=layers), measured.get("rates", {}))
    kernel = measured.get("attention", {}).get(recipe.model.attention)
    if products is None or kernel is None:
        return None
    once = [kernel[part]["seconds"] for part in ("forward", "backward")]
    # Null where what was measured was no number.
    if None in once:
        return None
    attention = sum(once) * recipe.microbatches * (layers or recipe.model.layers)
    flops = flops_per_token(recipe, layers=layers) * recipe.tokens_per_step
    share = 100 * flops / (products + attention) / peak if peak else None
    return Bound(products, attention, share)

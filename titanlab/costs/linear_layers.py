"""The linear layers of a model, by path, from its declared parameters."""

from __future__ import annotations

import fnmatch

from titanlab.costs.account import ModelAccount
from titanlab.costs.tensor_styles import cut_dim

# Styles in a tensor plan of layers that multiply.
_PRODUCTS = ("colwise", "rowwise", "head")


def linear_layers(model: ModelAccount) -> dict[str, tuple[int, ...]]:
    """Path of every linear layer → shape of its weight, [out, in].

    These are the layers whose style in the tensor plan is a product; without a plan, all matrices but tables.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, shape in model.parameters.items():
        name, _, leaf = parameter.rpartition(".")
        multiplies = not model.tensor_plan or model.plan.style_of(name) in _PRODUCTS
        if leaf == "weight" and len(shape) == 2 and multiplies and parameter not in (model.embedding, *model.lookups):
            shapes[name] = shape
    return shapes


def matches(name: str, pattern: str) -> bool:
    """Whether steps of a module's path match a pattern: `wk`, `feed_forward.w*`, `layers.0`, or a whole path."""
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def part_shape(model: ModelAccount, name: str, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel rank's part of a linear layer's weight; if parts are uneven, of the first."""
    cut = cut_dim(model.plan.style_of(name), len(shape))
    return tuple(-(-size // degree) if dim == cut else size for dim, size in enumerate(shape))

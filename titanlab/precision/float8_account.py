"""What float8 does to a model, from its account: which linear layers change, and what is in the way. Torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlab.costs.account import ModelAccount, style_of
from titanlab.costs.tensor_styles import cut_dim

# Styles of a tensor plan that are products.
_PRODUCTS = ("colwise", "rowwise", "head")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The linear layers of a model, by what becomes of them; each by its path, in the model's order.

    Attributes:
        converted: compute in the new format; with the shape of the weight, [out, in].
        skipped: left as they are because the recipe names them.
        uneven: left as they are because a dim of theirs does not divide; with the weight's shape.
    """

    converted: Mapping[str, tuple[int, ...]]
    skipped: tuple[str, ...]
    uneven: Mapping[str, tuple[int, ...]]


def conversion(model: ModelAccount, *, skip: Sequence[str], multiple: int) -> Conversion:
    """Sort a model's linear layers: those that the tensor plan multiplies with, or, without a plan, all matrices.

    Args:
        skip: patterns of names, see `matches`.
        multiple: what both dims of a weight have to be multiples of.
    """
    converted, uneven, skipped = {}, {}, []
    for name, shape in linear_layers(model).items():
        if any(matches(name, pattern) for pattern in skip):
            skipped.append(name)
        elif any(size % multiple for size in shape):
            uneven[name] = shape
        else:
            converted[name] = shape
    return Conversion(converted=converted, skipped=tuple(skipped), uneven=uneven)


def linear_layers(model: ModelAccount) -> dict[str, tuple[int, ...]]:
    """Path of every linear layer → shape of its weight, [out, in]. The embedding's table is none."""
    found: dict[str, tuple[int, ...]] = {}
    for parameter, shape in model.parameters.items():
        name, _, leaf = parameter.rpartition(".")
        planned = not model.tensor_plan or style_of(model.tensor_plan, name) in _PRODUCTS
        looked_up = parameter in (model.embedding, *model.lookups)
        if leaf == "weight" and len(shape) == 2 and planned and not looked_up:
            found[name] = shape
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a module's path has steps that a pattern fits: `wk`, `feed_forward.w*`, `layers.0`, or a whole path."""
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def part_shape(model: ModelAccount, name: str, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """What one of `degree` tensor-parallel ranks has of a linear layer's weight; the first of uneven parts."""
    cut = cut_dim(style_of(model.tensor_plan, name), len(shape))
    return tuple(-(-size // degree) if dim == cut else size for dim, size in enumerate(shape))


def describe(conversion: Conversion) -> str:
    """For people: how many layers compute in the new format, and which do not."""
    text = f"{len(conversion.converted)} linear layers"
    left = [*conversion.skipped, *(f"{name} ({'×'.join(map(str, s))})" for name, s in conversion.uneven.items())]
    if left:
        shown = left if len(left) <= 3 else [*left[:2], f"{len(left) - 2} more"]
        text += f", not {', '.join(shown)}"
    return text

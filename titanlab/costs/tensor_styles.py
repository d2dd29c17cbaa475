"""The styles of a tensor plan: what tensor parallelism does to a module, as data."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.account import ModelAccount, style_of


@dataclass(frozen=True, kw_only=True)
class TensorStyle:
    """What a style does.

    Attributes:
        cut_dim: the dim of a parameter that is cut; parameters without this dim, and all where it is None, stay whole.
        allows_uneven: the parts may be of different sizes.
        gathers: makes the residual stream whole: forward an all-gather or nothing, backward a sum.
        sums: returns to the residual stream: forward a sum, backward an all-gather or nothing.
        has_parameters: the module has parameters of its own.
    """

    cut_dim: int | None = None
    allows_uneven: bool = False
    gathers: bool = False
    sums: bool = False
    has_parameters: bool = True


# `titanlab.parallelism.tensor` has the function of each.
STYLES = {
    "colwise": TensorStyle(cut_dim=0),
    "rowwise": TensorStyle(cut_dim=1, sums=True),
    "gathered": TensorStyle(gathers=True, has_parameters=False),
    "norm": TensorStyle(),
    "embedding": TensorStyle(cut_dim=0, allows_uneven=True, sums=True),
    "head": TensorStyle(cut_dim=0, allows_uneven=True, gathers=True),
}


def cut_dim(style: str, dims: int) -> int | None:
    """The dim that a style cuts of a parameter of so many dims; None: the parameter stays whole."""
    dim = STYLES[style].cut_dim if style in STYLES else None
    return dim if dim is not None and dim < dims else None


def parameter_style(account: ModelAccount, parameter: str) -> str:
    """The style of the module that has a parameter; empty: the plan does not name it."""
    return style_of(account.tensor_plan, parameter.rpartition(".")[0])

"""The styles of a tensor plan as data: how tensor parallelism treats a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.costs.account import ModelAccount, style_of


@dataclass(frozen=True, kw_only=True)
class TensorStyle:
    """One style.

    Attributes:
        cut_dim: the dim along which parameters are cut; None: they stay whole, as do parameters without this dim.
        allows_uneven: whether parts may have different sizes.
        is_stack: whether parameters have one dim before those of a layer: they are stacked matrices of experts.
        gathers: whether it gathers the residual stream: forward an all-gather or nothing, backward a sum.
        sums: whether it sums into the residual stream: forward a sum, backward an all-gather or nothing.
        has_parameters: whether the module has parameters of its own.
        treats_part: whether it treats a rank's part of an activation with whole parameters, so that each rank has a
            partial gradient of them.
    """

    cut_dim: int | None = None
    allows_uneven: bool = False
    is_stack: bool = False
    gathers: bool = False
    sums: bool = False
    has_parameters: bool = True
    treats_part: bool = False


# `titanlab.parallelism.tensor` implements them.
STYLES = {
    "colwise": TensorStyle(cut_dim=0),
    "rowwise": TensorStyle(cut_dim=1, sums=True),
    "gathered": TensorStyle(gathers=True, has_parameters=False),
    "norm": TensorStyle(),
    "head_norm": TensorStyle(treats_part=True),
    # All ranks choose the same experts for all tokens, and each has a part of every expert.
    "experts": TensorStyle(gathers=True, sums=True, has_parameters=False),
    "router": TensorStyle(treats_part=True),
    "expert_colwise": TensorStyle(cut_dim=1, is_stack=True),
    "expert_rowwise": TensorStyle(cut_dim=2, is_stack=True),
    # Of expert parallelism, which cuts the stack among ranks of its own; see `titanlab.costs.shard_account`.
    "expert_stack": TensorStyle(cut_dim=0, is_stack=True),
    "embedding": TensorStyle(cut_dim=0, allows_uneven=True, sums=True),
    "head": TensorStyle(cut_dim=0, allows_uneven=True, gathers=True),
}


def cut_dim(style: str, dims: int) -> int | None:
    """The dim along which a style cuts a parameter with `dims` dims; None: the parameter stays whole."""
    dim = STYLES[style].cut_dim if style in STYLES else None
    return dim if dim is not None and dim < dims else None


def has_partial_gradient(plan: Mapping[str, str], parameter: str, *, sequence_parallel: bool) -> bool:
    """Whether each rank has a partial gradient of a whole parameter of a tensor plan."""
    if sequence_parallel:
        return True
    style = style_of(plan, parameter.rpartition(".")[0])
    return style in STYLES and STYLES[style].treats_part


def parameter_style(account: ModelAccount, parameter: str) -> str:
    """The style of the module that has a parameter; empty if the plan does not name the module."""
    return account.plan.style_of(parameter.rpartition(".")[0])

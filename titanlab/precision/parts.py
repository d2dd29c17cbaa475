"""Parts of a model that compute in float32 beside 16 bits: which modules they are, and what crosses their borders."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs.account import ModelAccount
from titanlab.precision.account import matched
from titanlab.precision.dtypes import Dtypes


class Units(NamedTuple):
    """What has to be gathered apart for parameters to be in two dtypes.

    whole: units in float32; the model itself stands for all that is in no other unit
    apart: units outside of the blocks, which are units anyway
    """

    whole: tuple[nn.Module, ...] = ()
    apart: tuple[nn.Module, ...] = ()


def keep_in_fp32(model: nn.Module, account: ModelAccount, dtypes: Dtypes) -> Units:
    """Cast what crosses the borders of a model's float32 parts, in place, and say how it is to be sharded.

    Args:
        model: all pieces of the account or, in a stage of a pipeline, some; on meta.
    """
    here = {piece: module for piece in account.pieces if (module := _found(model, piece)) is not None}
    parts = {piece: here[piece] for piece in matched(account, dtypes.fp32_parts) if piece in here}
    if not parts:
        return Units()
    for piece, part in parts.items():
        _cast_at_borders(part, dtypes.compute, keeps_output=piece == account.pieces[-1])
    edges = [piece for piece in here if piece not in _blocks(account) and any(True for _ in here[piece].parameters())]
    whole = tuple(parts.values())
    if not account.tied or not any(account.embedding.startswith(f"{piece}.") for piece in parts):
        return Units(whole, tuple(here[piece] for piece in edges if piece in parts))
    # Table and head are one tensor, which is whole for both where it is the rest's: then others have to make room.
    return Units((*whole, model), tuple(here[piece] for piece in edges if piece not in parts))


def _blocks(account: ModelAccount) -> frozenset[str]:
    return frozenset(piece for piece in account.pieces if piece.startswith("layers."))


def _found(model: nn.Module, piece: str) -> nn.Module | None:
    """A piece, or None in a stage that does not have it."""
    module: Any = model
    for step in piece.split("."):
        module = module[step] if isinstance(module, nn.ModuleDict) and step in module else getattr(module, step, None)
    return module if isinstance(module, nn.Module) else None


def _cast_at_borders(part: nn.Module, compute: torch.dtype, *, keeps_output: bool) -> None:
    """Give a module its hidden states in float32, and what it returns on in the compute dtype.

    By hooks of the module, outside of its forward pass: what is compiled or computed again does not cast again.

    Args:
        keeps_output: what it returns stays in float32: logits.
    """

    def raise_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_cast(each, compute, torch.float32) for each in inputs)

    def lower_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, torch.float32, compute)

    # Before what tensor parallelism does to inputs.
    part.register_forward_pre_hook(raise_inputs, prepend=True)
    if not keeps_output:
        part.register_forward_hook(lower_output)


def _cast(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    return value.to(wanted) if isinstance(value, Tensor) and value.dtype == given else value

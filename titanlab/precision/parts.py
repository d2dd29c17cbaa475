"""Parts of a model that compute in float32 while the rest computes in 16 bits, and the casts around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs.account import ModelAccount, is_in_block
from titanlab.precision.account import matched
from titanlab.precision.dtypes import Dtypes


class Units(NamedTuple):
    """Modules that FSDP2 must gather as separate units, because parameters have two dtypes.

    whole: units in float32; the model itself means all parameters that are in no other unit
    apart: separate units that are not blocks (every block is a unit)
    """

    whole: tuple[nn.Module, ...] = ()
    apart: tuple[nn.Module, ...] = ()


def keep_in_fp32(model: nn.Module, account: ModelAccount, dtypes: Dtypes) -> Units:
    """Add casts around a model's float32 parts, in place, and return the units that FSDP2 must gather separately.

    Args:
        model: on the meta device; a pipeline stage has some of the account's pieces.
    """
    pieces = {piece: module for piece in account.pieces if (module := _piece(model, piece)) is not None}
    parts = {piece: pieces[piece] for piece in matched(account, dtypes.fp32_parts) if piece in pieces}
    if not parts:
        return Units()
    for piece, part in parts.items():
        _cast_around(part, dtypes.compute, keeps_output=piece == account.pieces[-1])
    blocks = _blocks(account)
    edges = [piece for piece in pieces if piece not in blocks and any(True for _ in pieces[piece].parameters())]
    whole = tuple(parts.values())
    if not account.tied or not any(account.embedding.startswith(f"{piece}.") for piece in parts):
        return Units(whole, tuple(pieces[piece] for piece in edges if piece in parts))
    # Embedding and head share one table, which belongs to the root's unit: that unit is in float32, and the other
    # pieces outside of blocks need separate units.
    return Units((*whole, model), tuple(pieces[piece] for piece in edges if piece not in parts))


def _blocks(account: ModelAccount) -> frozenset[str]:
    return frozenset(piece for piece in account.pieces if is_in_block(piece))


def _piece(model: nn.Module, piece: str) -> nn.Module | None:
    """A piece of a model; None in a stage that does not have it."""
    module: Any = model
    for step in piece.split("."):
        module = module[step] if isinstance(module, nn.ModuleDict) and step in module else getattr(module, step, None)
    return module if isinstance(module, nn.Module) else None


def _cast_around(part: nn.Module, compute: torch.dtype, *, keeps_output: bool) -> None:
    """Cast a module's inputs to float32, and its output to the compute dtype.

    Hooks outside of the forward pass do this, so that compilation and recomputation do not repeat the casts.

    Args:
        keeps_output: whether the output stays in float32, as logits do.
    """

    def raise_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_cast(value, compute, torch.float32) for value in inputs)

    def lower_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, torch.float32, compute)

    # Before tensor parallelism's own hook on inputs.
    part.register_forward_pre_hook(raise_inputs, prepend=True)
    if not keeps_output:
        part.register_forward_hook(lower_output)


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return value.to(after) if isinstance(value, Tensor) and value.dtype == before else value

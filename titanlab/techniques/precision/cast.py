"""Precisions that only cast (FSDP2 casts parameters when it gathers them), and the casts around parts in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs.account import ModelAccount, is_in_block
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.techniques.precision.contract import Formats, matched
from titanlab.techniques.precision.loss_scale import DynamicLossScale, LossScale


class Cast:
    """Does nothing in its methods: `parallelism/shard.py` casts. Other precisions inherit methods they do not need."""

    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Does not change the model."""

    def loss_scale(self, device: torch.device) -> LossScale:
        """The loss is not scaled."""
        return LossScale()

    def after_update(self, model: nn.Module) -> None:
        """Does nothing."""


class ScaledCast(Cast):
    """Casts, and scales the loss so that gradients stay within float16's range: 2⁻²⁴ to 65,504."""

    def __init__(self, config: Fp16) -> None:
        self._config = config

    def loss_scale(self, device: torch.device) -> LossScale:
        """A scale on `device`; a constant one changes by factors of 1."""
        config = self._config
        return DynamicLossScale(
            device=device,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor if config.dynamic else 1.0,
            growth_interval=config.growth_interval,
            backoff_factor=config.backoff_factor if config.dynamic else 1.0,
            # A constant scale has no smallest value.
            min_scale=config.min_scale if config.dynamic else 0.0,
            max_skips=config.max_skips,
        )


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """`titanlab.techniques.precision.contract.Formats` with torch's dtypes."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    fp32_parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, formats: Formats) -> Dtypes:
        """Look up the dtypes by name."""
        master, compute, reduce = (getattr(torch, name) for name in (formats.master, formats.compute, formats.reduce))
        return cls(master=master, compute=compute, reduce=reduce, fp32_parts=formats.fp32_parts)

    @property
    def mixed(self) -> bool:
        """Whether parameters are cast before they compute, or gradients before they are summed."""
        return self.compute != self.master or self.reduce != self.master


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

"""optimizer=adamw_8bit, adamw_4bit and adamw_fp8: torchao's formats for the averages of AdamW."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanlab.optimizer.low_bit import Format, LowBitAdamW
from titanlab.optimizer.low_bit_schema import LowBit
from titanlab.system.imports import import_quietly


class LowBitFactory:
    """AdamW with averages in few bits for matrices whose rows consist of complete blocks."""

    def __init__(self, config: LowBit) -> None:
        self._config = config

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See `OptimizerFactory`."""
        config, device = self._config, next(iter(parameters.values())).device
        states = _FORMATS[config.kind](config.block_size, device)
        return LowBitAdamW(config, parameters, states=states, block_size=config.block_size)


def _eight_bits(block_size: int, device: torch.device) -> Format:
    packed = import_quietly("torchao.optim.subclass_8bit").OptimState8bit
    # The value of every code; signed and unsigned averages have different tables.
    tables = {signed: packed.zeros((block_size,), signed, block_size, device).qmap for signed in (True, False)}

    def wrap(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = packed(codes, scale, tables[signed], signed)
        return tensor

    return Format(dtype=torch.uint8, per_code=1, wrap=wrap)


def _four_bits(block_size: int, device: torch.device) -> Format:
    packed = import_quietly("torchao.optim.subclass_4bit").OptimState4bit
    tables = {signed: packed.zeros((block_size,), signed, block_size, device).qmap for signed in (True, False)}

    def wrap(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = packed(codes.view(-1), scale, tables[signed], signed, shape)
        return tensor

    return Format(dtype=torch.uint8, per_code=2, wrap=wrap)


def _fp8(block_size: int, device: torch.device) -> Format:
    packed = import_quietly("torchao.optim.subclass_fp8").OptimStateFp8

    def wrap(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = packed(codes, scale)
        return tensor

    return Format(dtype=torch.float8_e4m3fn, per_code=1, wrap=wrap)


_FORMATS = {"adamw_8bit": _eight_bits, "adamw_4bit": _four_bits, "adamw_fp8": _fp8}

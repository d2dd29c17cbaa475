"""optimizer=adamw_4bit: AdamW with torchao's 4-bit averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanlab.optimizer.adamw_4bit_schema import AdamW4bit
from titanlab.optimizer.low_bit import Format, LowBitAdamW, quiet


def build(config: AdamW4bit, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters that this rank holds; matrices of whole blocks have averages in few bits."""
    with quiet():
        from torchao.optim.subclass_4bit import OptimState4bit

    size, device = config.block_size, next(iter(parameters.values())).device
    # What every code stands for: a table of its own for averages that have a sign.
    maps = {signed: OptimState4bit.zeros((size,), signed, size, device).qmap for signed in (True, False)}

    def opened(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = OptimState4bit(codes.view(-1), scale, maps[signed], signed, shape)
        return tensor

    return LowBitAdamW(config, parameters, states=Format(dtype=torch.uint8, per_code=2, opened=opened), block_size=size)

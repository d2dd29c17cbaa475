"""optimizer=adamw_8bit: AdamW with torchao's 8-bit averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanlab.optimizer.adamw_8bit_schema import AdamW8bit
from titanlab.optimizer.low_bit import Format, LowBitAdamW, quiet


def build(config: AdamW8bit, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters that this rank holds; matrices of whole blocks have averages in few bits."""
    with quiet():
        from torchao.optim.subclass_8bit import OptimState8bit

    size, device = config.block_size, next(iter(parameters.values())).device
    # What every code stands for: a table of its own for averages that have a sign.
    maps = {signed: OptimState8bit.zeros((size,), signed, size, device).qmap for signed in (True, False)}

    def opened(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = OptimState8bit(codes, scale, maps[signed], signed)
        return tensor

    return LowBitAdamW(config, parameters, states=Format(dtype=torch.uint8, per_code=1, opened=opened), block_size=size)

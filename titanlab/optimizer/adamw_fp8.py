"""optimizer=adamw_fp8: AdamW with torchao's float8 averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanlab.optimizer.adamw_fp8_schema import AdamWFp8
from titanlab.optimizer.low_bit import Format, LowBitAdamW, quiet


def build(config: AdamWFp8, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters that this rank holds; matrices of whole blocks have averages in few bits."""
    with quiet():
        from torchao.optim.subclass_fp8 import OptimStateFp8

    def opened(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        tensor: Tensor = OptimStateFp8(codes, scale)
        return tensor

    kept = Format(dtype=torch.float8_e4m3fn, per_code=1, opened=opened)
    return LowBitAdamW(config, parameters, states=kept, block_size=config.block_size)

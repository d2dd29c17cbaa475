"""precision=float8_rowwise_with_gw_hp: rowwise float8, and gradients of weights in bfloat16."""

from __future__ import annotations

from titanlab.precision.float8 import after_update, convert, dtypes, tensor_styles

__all__ = ["after_update", "convert", "dtypes", "tensor_styles"]

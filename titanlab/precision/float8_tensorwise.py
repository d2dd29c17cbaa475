"""precision=float8_tensorwise: float8 products with one scale for each tensor."""

from __future__ import annotations

from titanlab.precision.float8 import after_update, convert, dtypes, tensor_styles

__all__ = ["after_update", "convert", "dtypes", "tensor_styles"]

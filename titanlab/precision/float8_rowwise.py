"""precision=float8_rowwise: float8 products with a scale for each row."""

from __future__ import annotations

from titanlab.precision.float8 import after_update, convert, dtypes, tensor_styles

__all__ = ["after_update", "convert", "dtypes", "tensor_styles"]

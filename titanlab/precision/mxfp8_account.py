"""What precision=mxfp8 declares about itself: the formats of bf16 around its products."""

from __future__ import annotations

from titanlab.precision.bf16_account import account

__all__ = ["account"]

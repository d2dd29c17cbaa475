"""Config of optimizer=adamw_8bit."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.optimizer.low_bit_schema import LowBit
from titanlab.options import option


@option("optimizer", "adamw_8bit")
@dataclass(kw_only=True)
class AdamW8bit(LowBit):
    """AdamW with 8-bit averages (arXiv 2110.02861)."""

    kind: str = "adamw_8bit"

"""Config of optimizer=adamw_4bit."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.optimizer.low_bit_schema import LowBit
from titanlab.options import option


@option("optimizer", "adamw_4bit")
@dataclass(kw_only=True)
class AdamW4bit(LowBit):
    """AdamW with 4-bit averages (arXiv 2309.01507)."""

    kind: str = "adamw_4bit"
    block_size: int = 128

"""Config of precision=bf16."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("precision", "bf16")
@dataclass(kw_only=True)
class Bf16:
    """Forward and backward in bfloat16; parameters, reductions and optimizer state in 32 bits."""

    kind: str = "bf16"

"""Config of precision=fp32."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("precision", "fp32")
@dataclass(kw_only=True)
class Fp32:
    """Everything in 32-bit floating point."""

    kind: str = "fp32"

"""Config of precision=fp64."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("precision", "fp64")
@dataclass(kw_only=True)
class Fp64:
    """Everything in 64-bit floating point: what fp32 itself can be held to."""

    kind: str = "fp64"

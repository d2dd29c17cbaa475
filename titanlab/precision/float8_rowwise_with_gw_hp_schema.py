"""Config of precision=float8_rowwise_with_gw_hp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titanlab.options import option
from titanlab.precision.float8_schema import Float8


@option("precision", "float8_rowwise_with_gw_hp")
@dataclass(kw_only=True)
class Float8RowwiseWithGwHp(Float8):
    """Rowwise float8, but gradients of weights are multiplied in bfloat16: the finest of the three."""

    kind: str = "float8_rowwise_with_gw_hp"

    recipe: ClassVar[str] = "rowwise_with_gw_hp"
    multiplies_tokens: ClassVar[bool] = False

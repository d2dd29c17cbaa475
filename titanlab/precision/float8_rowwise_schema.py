"""Config of precision=float8_rowwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titanlab.options import option
from titanlab.precision.float8_schema import Float8


@option("precision", "float8_rowwise")
@dataclass(kw_only=True)
class Float8Rowwise(Float8):
    """Float8 with a scale, a power of two, for each row and column that is multiplied: finer than tensorwise."""

    kind: str = "float8_rowwise"

    recipe: ClassVar[str] = "rowwise"

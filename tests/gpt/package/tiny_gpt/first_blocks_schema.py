"""Config of ac=first_blocks."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("ac", "first_blocks")
@dataclass(kw_only=True)
class FirstBlocks:
    """The first `count` blocks keep nothing but their input, the others all."""

    kind: str = "first_blocks"
    count: int = 1

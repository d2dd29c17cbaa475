"""ac=first_blocks: a pipeline's first stages hold most microbatches, so that memory is scarce there."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.techniques.ac.contract import ACConfig


@option("ac", "first_blocks")
@dataclass(frozen=True, kw_only=True)
class FirstBlocks(ACConfig):
    """The first `count` blocks keep nothing but their input, the others all."""

    kind: str = "first_blocks"
    count: int = 1

    def recomputes(self, number: int) -> bool:
        """number: of the block in the whole model."""
        return number < self.count

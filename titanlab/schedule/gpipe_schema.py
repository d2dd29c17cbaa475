"""Config of schedule=gpipe."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("schedule", "gpipe")
@dataclass(kw_only=True)
class GPipe:
    """All microbatches forward, then all backward (arXiv 1811.06965)."""

    kind: str = "gpipe"

"""Config of ac=full."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("ac", "full")
@dataclass(kw_only=True)
class FullCheckpointing:
    """Of every block only its input is kept; its forward is computed again in the backward (arXiv 1604.06174)."""

    kind: str = "full"

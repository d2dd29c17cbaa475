"""Config of ac=none."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("ac", "none")
@dataclass(kw_only=True)
class NoCheckpointing:
    """Everything that the backward pass needs is kept."""

    kind: str = "none"

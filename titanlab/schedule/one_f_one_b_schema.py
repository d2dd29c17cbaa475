"""Config of schedule=1f1b."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("schedule", "1f1b")
@dataclass(kw_only=True)
class OneFOneB:
    """One forward, one backward in turn, as soon as there is something to go backward with (arXiv 2006.09503)."""

    kind: str = "1f1b"

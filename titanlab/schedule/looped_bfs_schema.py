"""Config of schedule=looped_bfs."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.virtual_schema import Looped


@option("schedule", "looped_bfs")
@dataclass(kw_only=True)
class LoopedBFS(Looped):
    """All microbatches through one stage before the rank's next one (arXiv 2211.05953).

    Attributes:
        stages_per_rank: parts of the model that each rank has, none next to another; more of them: less bubble,
            more communication.
    """

    kind: str = "looped_bfs"

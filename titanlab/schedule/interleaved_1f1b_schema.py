"""Config of schedule=interleaved_1f1b."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.virtual_schema import Looped


@option("schedule", "interleaved_1f1b")
@dataclass(kw_only=True)
class Interleaved1F1B(Looped):
    """1F1B over several stages a rank (arXiv 2104.04473, section 2.2).

    Attributes:
        stages_per_rank: parts of the model that each rank has, none next to another; more of them: less bubble,
            more communication.
    """

    kind: str = "interleaved_1f1b"

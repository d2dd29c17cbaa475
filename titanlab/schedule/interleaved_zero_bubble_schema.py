"""Config of schedule=interleaved_zero_bubble."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.virtual_schema import Looped


@option("schedule", "interleaved_zero_bubble")
@dataclass(kw_only=True)
class InterleavedZeroBubble(Looped):
    """Interleaved 1F1B whose gradients of weights wait for idle time (ZB-H1, arXiv 2401.10241).

    Attributes:
        stages_per_rank: parts of the model that each rank has, none next to another; more of them: less bubble,
            more communication.
    """

    kind: str = "interleaved_zero_bubble"

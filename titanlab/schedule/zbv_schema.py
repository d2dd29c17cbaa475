"""Config of schedule=zbv."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.virtual_schema import VShaped


@option("schedule", "zbv")
@dataclass(kw_only=True)
class ZBV(VShaped):
    """Zero bubble over stages laid out as a V (ZB-V, arXiv 2401.10241, section 6).

    Attributes:
        stages_per_rank: 2, as the V has it.
    """

    kind: str = "zbv"

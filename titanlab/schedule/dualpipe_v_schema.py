"""Config of schedule=dualpipe_v."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.virtual_schema import VShaped


@option("schedule", "dualpipe_v")
@dataclass(kw_only=True)
class DualPipeV(VShaped):
    """DualPipe over stages laid out as a V (arXiv 2412.19437, section 3.2.1).

    Attributes:
        stages_per_rank: 2, as the V has it.
    """

    kind: str = "dualpipe_v"

"""Every schedule at sizes from one rank up, and torch's own orders of them."""

from __future__ import annotations

from titanlab.options import schema_of
from titanlab.techniques.schedule.action import Action, Kind
from titanlab.techniques.schedule.contract import PipelineSchedule

LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs")
V_SHAPED = ("zbv", "dualpipe_v")
KINDS = ("gpipe", "1f1b", *LOOPED, *V_SHAPED)


class Schedule:
    """A schedule by its kind."""

    def __init__(self, kind: str, stages_per_rank: int = 2) -> None:
        schema = schema_of("schedule", kind)
        self.config: PipelineSchedule = schema(stages_per_rank=stages_per_rank) if kind in LOOPED else schema()
        self.stages_per_rank = stages_per_rank if kind in LOOPED else 2 if kind in V_SHAPED else 1

    def placement(self, ranks: int) -> list[int]:
        return self.config.placement(ranks=ranks)

    def actions(self, ranks: int, microbatches: int) -> list[list[Action]]:
        self.config.check_pipeline(ranks=ranks, microbatches=microbatches)
        return self.config.actions(ranks=ranks, microbatches=microbatches)


def orders(*ranks: str) -> list[list[Action]]:
    """`orders("0F0 0B0", "1F0 1B0")`: microbatches and stages of one digit."""
    return [[Action(int(a[0]), Kind(a[1]), int(a[2])) for a in rank.split()] for rank in ranks]


def words(lists: list[list[Action]]) -> list[str]:
    """The inverse of `orders`."""
    return [" ".join(map(str, order)) for order in lists]

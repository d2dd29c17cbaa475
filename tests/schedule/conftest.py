"""Every schedule at sizes from one rank up, and torch's own orders of them."""

from __future__ import annotations

from typing import Any

import pytest

from titanlab.options import discover, implementation, schema_of
from titanlab.schedule.action import Action

LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs")
V_SHAPED = ("zbv", "dualpipe_v")
KINDS = ("gpipe", "1f1b", *LOOPED, *V_SHAPED)


class Schedule:
    """A schedule's config and code."""

    def __init__(self, kind: str, stages_per_rank: int = 2) -> None:
        schema = schema_of("schedule", kind)
        self.config: Any = schema(stages_per_rank=stages_per_rank) if kind in LOOPED else schema()
        self.part = implementation(self.config)
        self.stages_per_rank = stages_per_rank if kind in LOOPED else 2 if kind in V_SHAPED else 1

    def placement(self, ranks: int) -> list[int]:
        return self.part.placement(self.config, ranks=ranks)

    def actions(self, ranks: int, microbatches: int) -> list[list[Action]]:
        self.part.check(self.config, ranks=ranks, microbatches=microbatches)
        return self.part.actions(self.config, ranks=ranks, microbatches=microbatches)


@pytest.fixture(scope="session")
def make() -> type[Schedule]:
    """`make("zbv").actions(ranks, microbatches)`."""
    assert {*KINDS, "csv"} == set(discover()["schedule"])
    return Schedule

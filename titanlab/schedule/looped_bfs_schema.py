"""schedule=looped_bfs: looped breadth-first (arXiv 2211.05953)."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.placement import Looped, stages_of


@option("schedule", "looped_bfs")
@dataclass(kw_only=True)
class LoopedBFS(Looped):
    """All microbatches run through one stage before the rank's next stage begins."""

    kind: str = "looped_bfs"

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Never."""
        return False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """All microbatches."""
        return microbatches

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank. Backward passes run in reverse: the last microbatch's activations are the newest."""
        orders = []
        for rank in range(ranks):
            stages = stages_of(self.placement(ranks=ranks), rank)
            forward = [Action(stage, Kind.FORWARD, number) for stage in stages for number in range(microbatches)]
            # The same stages and microbatches in reverse, with both halves of the backward pass at once.
            orders.append(forward + [action._replace(kind=Kind.BACKWARD) for action in reversed(forward)])
        return orders

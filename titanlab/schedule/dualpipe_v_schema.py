"""schedule=dualpipe_v: DualPipe (arXiv 2412.19437, section 3.2.1) over stages laid out as a V.

The order is that of github.com/deepseek-ai/DualPipe, dualpipe/dualpipev.py. Where that code runs a forward and a
backward pass at the same time, here the forward pass comes first; a runtime may overlap them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.placement import VShaped

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


@option("schedule", "dualpipe_v")
@dataclass(kw_only=True)
class DualPipeV(VShaped):
    """DualPipe over stages laid out as a V."""

    kind: str = "dualpipe_v"

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        """Check that there are enough microbatches.

        Raises:
            ConfigError: fewer microbatches than stages.
        """
        if microbatches < 2 * ranks:
            rule = f"needs at least {2 * ranks} microbatches, one for each of its stages, and a step has {microbatches}"
            factor = -(-2 * ranks // microbatches)
            cure = f"try schedule=zbv, or training.global_batch times {factor}"
            raise ConfigError("schedule", self.kind, rule, cure)

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Always."""
        return True

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """The forward passes of the warm-up and one of the steady phase, of two stages."""
        return ranks + 0.5

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        self.check_pipeline(ranks=ranks, microbatches=microbatches)
        return [_of_rank(rank, ranks=ranks, microbatches=microbatches) for rank in range(ranks)]


def _of_rank(rank: int, *, ranks: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stages in the first and in the second half of the V
    after = ranks - 1 - rank
    order = ActionList()
    postponed: deque[int] = deque()  # stages whose gradients of weights are not scheduled yet, oldest first

    def gradient_of_input(stage: int) -> None:
        order.add(stage, I)
        postponed.append(stage)

    def gradient_of_weights() -> None:
        if postponed:
            order.add(postponed.popleft(), W)

    # Warm-up: forward passes of the first half of the V, then of both halves, then backward passes of the second half.
    order.add(down, *[F] * (2 * after))
    for _ in range(rank + 1):
        order.add(down, F)
        order.add(up, F)
    for _ in range(after):
        gradient_of_input(up)
        gradient_of_weights()
        order.add(up, F)
    # Steady: a forward pass in one half of the V beside a backward pass in the other.
    for _ in range(microbatches - 2 * ranks + rank + 1):
        order.add(down, F)
        order.add(up, B, F)
        order.add(down, B)
    for _ in range(after):
        order.add(up, B, F)
        order.add(down, B)
    # Cool-down: from the middle on, gradients of inputs first; those of weights fill idle time.
    for step in range(2 * (rank + 1)):
        stage = down if step % 2 else up
        if step > rank:
            gradient_of_input(stage)
        else:
            order.add(stage, B)
    for _ in range(after):
        gradient_of_weights()
        gradient_of_input(down)
    while postponed:
        gradient_of_weights()
    return list(order)

"""Schedules of papers: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, looped_bfs, zbv, dualpipe_v."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import ClassVar

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.schedule.action import Action, ActionList, Kind
from titanlab.techniques.schedule.contract import Looped, OneStage, VShaped, stages_of

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


@option("schedule", "dualpipe_v")
@dataclass(frozen=True, kw_only=True)
class DualPipeV(VShaped):
    """DualPipe (arXiv 2412.19437, section 3.2.1) over stages laid out as a V.

    The order is that of github.com/deepseek-ai/DualPipe, dualpipe/dualpipev.py. Where that code runs a forward and a
    backward pass at the same time, here the forward pass comes first; a runtime may overlap them.
    """

    kind: str = "dualpipe_v"
    splits: ClassVar[bool | None] = True

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        if microbatches < 2 * ranks:
            rule = f"needs at least {2 * ranks} microbatches, one for each of its stages, and a step has {microbatches}"
            factor = -(-2 * ranks // microbatches)
            cure = f"try schedule=zbv, or training.global_batch times {factor}"
            raise ConfigError("schedule", self.kind, rule, cure)

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """The forward passes of the warm-up and one of the steady phase; each counts half, as a rank has two stages."""
        return ranks + 0.5

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        self.check_pipeline(ranks=ranks, microbatches=microbatches)
        return [_dualpipe_v_of_rank(rank, ranks=ranks, microbatches=microbatches) for rank in range(ranks)]


def _dualpipe_v_of_rank(rank: int, *, ranks: int, microbatches: int) -> list[Action]:
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
    # Cool-down: from the middle on, gradients of inputs first; gradients of weights fill idle time.
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


@option("schedule", "gpipe")
@dataclass(frozen=True, kw_only=True)
class GPipe(OneStage):
    """All microbatches forward, then all backward (arXiv 1811.06965)."""

    kind: str = "gpipe"
    splits: ClassVar[bool | None] = False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        return microbatches

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        numbers = range(microbatches)
        return [[Action(rank, kind, number) for kind in (F, B) for number in numbers] for rank in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class _Interleaved(Looped):
    """A schedule that runs microbatches in rounds; its subclasses say when the backward passes begin.

    In a round, a rank runs some microbatches through its first stage, then the same through its second, and so on;
    backward passes go from its last stage to its first (depth first, arXiv 2104.04473). In the paper a round has as
    many microbatches as there are ranks, so their total is a multiple of the ranks. Here rounds are as equal as
    possible and have at least as many microbatches as there are ranks, so any total works; if rounds are equal, the
    order is torch's.
    """

    # How many more forward passes a rank runs before its first backward pass than the next rank does.
    _lead_per_rank: ClassVar[int]
    # The kinds of backward passes; for each, how many turns later it begins on the next rank.
    _backward: ClassVar[tuple[tuple[Kind, int], ...]]

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """The forward passes of the warm-up, and one more that runs just before the first backward pass."""
        longest = len(rounds(ranks=ranks, microbatches=microbatches)[0])
        lead = (self.stages_per_rank - 1) * longest + self._lead_per_rank * (ranks - 1)
        return min(lead + 1, self.stages_per_rank * microbatches) / self.stages_per_rank

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        microbatches_by_round = rounds(ranks=ranks, microbatches=microbatches)
        longest = len(microbatches_by_round[0])
        orders = []
        for rank in range(ranks):
            stages = stages_of(self.placement(ranks=ranks), rank)
            # (stage, microbatch) in the rank's order.
            forward, backward = (
                [(stage, number) for numbers in microbatches_by_round for stage in direction for number in numbers]
                for direction in (stages, stages[::-1])
            )
            # The number of forward passes before the first backward pass.
            lead = min(len(forward), (len(stages) - 1) * longest + self._lead_per_rank * (ranks - 1 - rank))
            passes = [(F, forward, 0), *((kind, backward, lead + rank * later) for kind, later in self._backward)]
            orders.append(_in_turn(passes))
        return orders


@option("schedule", "interleaved_1f1b")
@dataclass(frozen=True, kw_only=True)
class Interleaved1F1B(_Interleaved):
    """1F1B with several stages per rank (arXiv 2104.04473, section 2.2)."""

    kind: str = "interleaved_1f1b"
    splits: ClassVar[bool | None] = False
    # Each rank after this one delays the first gradient by two turns: the activation passes it, then the gradient does.
    _lead_per_rank: ClassVar[int] = 2
    _backward: ClassVar[tuple[tuple[Kind, int], ...]] = ((B, 0),)


@option("schedule", "interleaved_zero_bubble")
@dataclass(frozen=True, kw_only=True)
class InterleavedZeroBubble(_Interleaved):
    """Interleaved 1F1B that computes gradients of weights in otherwise idle time (ZB-H1, arXiv 2401.10241)."""

    kind: str = "interleaved_zero_bubble"
    splits: ClassVar[bool | None] = True
    # A gradient of the input arrives sooner than after a full backward pass, so a shorter lead is enough.
    _lead_per_rank: ClassVar[int] = 1
    # Gradients of weights lag by the rank's number: a later rank has gradients sooner, and has more idle time at the
    # end for the remaining gradients of weights.
    _backward: ClassVar[tuple[tuple[Kind, int], ...]] = ((I, 0), (W, 1))


def rounds(*, ranks: int, microbatches: int) -> list[range]:
    """Microbatches of every round, the larger rounds first."""
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    ends = list(accumulate([size + 1] * rest + [size] * (count - rest)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _in_turn(passes: list[tuple[Kind, list[tuple[int, int]], int]]) -> list[Action]:
    """Actions in which kinds take turns; `passes`: each kind, its (stage, microbatch) pairs, and its first turn."""
    columns = [
        [*[None] * begin, *(Action(stage, kind, number) for stage, number in steps)] for kind, steps, begin in passes
    ]
    return [action for turn in zip_longest(*columns) for action in turn if action is not None]


@option("schedule", "looped_bfs")
@dataclass(frozen=True, kw_only=True)
class LoopedBFS(Looped):
    """All microbatches run through one stage before the rank's next stage begins (arXiv 2211.05953)."""

    kind: str = "looped_bfs"
    splits: ClassVar[bool | None] = False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        return microbatches

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank. Backward passes run in reverse: the last microbatch's activations are the newest."""
        orders = []
        for rank in range(ranks):
            stages = stages_of(self.placement(ranks=ranks), rank)
            forward = [Action(stage, F, number) for stage in stages for number in range(microbatches)]
            # The same stages and microbatches in reverse, with both halves of the backward pass at once.
            orders.append(forward + [action._replace(kind=Kind.BACKWARD) for action in reversed(forward)])
        return orders


@option("schedule", "1f1b")
@dataclass(frozen=True, kw_only=True)
class OneFOneB(OneStage):
    """Forward and backward passes alternate as soon as the first gradient can arrive.

    PipeDream-Flush (arXiv 2006.09503); PipeDream (arXiv 1806.03377).
    """

    kind: str = "1f1b"
    splits: ClassVar[bool | None] = False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """One microbatch for each stage, or all if there are fewer."""
        return min(ranks, microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        orders = []
        for rank in range(ranks):
            # As many forward passes as stages from this rank to the last: then the first gradient can arrive.
            warm_up = min(microbatches, ranks - rank)
            order = ActionList()
            order.add(rank, *[F] * warm_up)
            order.add(rank, *[B, F] * (microbatches - warm_up))
            order.add(rank, *[B] * warm_up)
            orders.append(list(order))
        return orders


@option("schedule", "zbv")
@dataclass(frozen=True, kw_only=True)
class ZBV(VShaped):
    """Zero bubble over stages laid out as a V (arXiv 2401.10241, section 6).

    A rank is never idle between its first and its last action if F, I and W take the same time and there are at least
    2·ranks − 1 microbatches. Ranks still begin and end at different times. In the paper a rank that has ended begins
    the next step; here all ranks end a step together, because they compute the norm of the gradients.
    """

    kind: str = "zbv"
    splits: ClassVar[bool | None] = True

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        return min(ranks, microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        # The construction needs 2·ranks − 1 microbatches. If there are fewer, construct as many and remove the surplus:
        # no microbatch waits for another.
        count = max(2 * ranks - 1, microbatches)
        orders = [_zbv_of_rank(rank, ranks=ranks, microbatches=count) for rank in range(ranks)]
        return [[action for action in order if action.microbatch < microbatches] for order in orders]


def _zbv_of_rank(rank: int, *, ranks: int, microbatches: int) -> ActionList:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stages in the first and in the second half of the V
    order = ActionList()
    # Warm-up: forward passes of the first half of the V, then of both halves, then backward passes of the second half.
    order.add(down, *[F] * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        order.add(up, F)
        order.add(down, F)
    for _ in range(ranks - rank):
        order.add(up, F, I, W)
    # Steady: forward and backward through both stages, until the first half has run all microbatches.
    for _ in range(microbatches - ranks):
        if order.done(down, F) < microbatches:
            order.add(down, F)
        order.add(down, I, W)
        order.add(up, F, I, W)
    # Cool-down: gradients of inputs first; gradients of weights fill idle time.
    for _ in range(rank):
        order.add(down, I)
        order.add(up, I)
    for _ in range(ranks - rank):
        order.add(down, I, W)
    order.add(up, *[W] * rank)
    order.add(down, *[W] * rank)
    return order

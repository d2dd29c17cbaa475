"""Finds the fastest recipes of a space that fit into memory, without estimating all of them.

It is a best-first search: every group of recipes has a lower bound of its recipes' times, and the group with the
smallest bound is refined. The first bounds contain only computation; the next bounds add communication inside blocks;
then come bounds of single recipes, without simulation; then estimates. The first estimate that leaves the queue is that
of the fastest recipe. `least_memory` leaves recipes out before their time is computed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.plan.block_time import model_time
from titanlab.plan.machine import Machine, axis_of
from titanlab.plan.memory import (
    PieceBytes,
    RankMemory,
    added,
    deferred_bytes,
    most_memory,
    reserved_bytes,
    saved_bytes,
    stored_pieces,
)
from titanlab.plan.pipeline_time import least_time
from titanlab.plan.space import Choice, LayoutSpace, SpacePoint, reducing_each
from titanlab.plan.stages import model_facts, placement_of, share_of, splits_backward
from titanlab.plan.step_time import BlocksTime, StepTime, blocks_time, least_seconds, step_time
from titanlab.recipe import Recipe
from titanlab.techniques.schedule.contract import PipelineSchedule


class RecipeGroup(NamedTuple):
    """A group of recipes that differ only in their schedule and in how data-parallel processes replicate or shard."""

    layouts: tuple[Layout, ...]
    microbatch: int
    ac: Choice
    precision: Choice
    compile: Choice

    def point(self, layout: Layout, schedule: Choice) -> SpacePoint:
        return SpacePoint(layout, self.microbatch, schedule, self.ac, self.precision, self.compile)


def least_memory(recipe: Recipe, schedules: Sequence[Choice], *, reduces_each: bool = False) -> float:
    """A lower bound of the bytes of the rank that needs most memory, for all recipes of a group.

    The bound assumes that all data-parallel processes shard parameters, and that a pipeline's ranks have equal parts.

    Args:
        recipe: any recipe of the group.
        schedules: those of the group's recipes; the bound takes the schedule that keeps the fewest microbatches.
        reduces_each: gradients may be reduced after each microbatch.
    """
    layout, model, formats, parallelism = recipe.layout, recipe.model, recipe.precision.formats(), recipe.parallelism
    shards = layout.data * layout.context
    whole = _stored(
        model, recipe.precision, recipe.optimizer, layout.tensor, shards, layout.expert, recipe.training.freeze
    )
    needed = 0.0 if parallelism.cpu_offload else float(whole.parameters + whole.optimizer)
    accumulates = recipe.microbatches > 1 or layout.pipeline > 1
    if accumulates and (layout.context > 1 or formats.mixed):
        needed += whole.unreduced // shards if reduces_each else whole.unreduced
        needed += 0 if parallelism.frees_after_forward else whole.gathered
    shape = (model, share_of(recipe), recipe.microbatch, recipe.training.seq_len)
    saved = float(saved_bytes(recipe.ac, *shape, compiled=recipe.compile.fuses_blocks))
    if layout.pipeline > 1:
        deferred = model_facts(model).account.layers * deferred_bytes(*shape)[""]
        configs = tuple(schedule.value for schedule in schedules)
        whole_passes, split_passes = _in_flight(configs, layout.pipeline, recipe.microbatches)
        saved = min(whole_passes * saved, split_passes * min(saved, deferred))
    return (needed + saved) / layout.pipeline


@functools.lru_cache(maxsize=4096)
def _stored(*key: Any) -> PieceBytes:
    return added(stored_pieces(*key).values())


@functools.lru_cache(maxsize=16384)
def _in_flight(schedules: tuple[PipelineSchedule, ...], ranks: int, microbatches: int) -> tuple[float, float]:
    """The fewest microbatches that any of the schedules keeps on its fullest rank, if stages are equal.

    The first number is for schedules that do not split the backward pass, the second for schedules that do. A number is
    infinite if there is no such schedule.
    """
    fewest = {False: math.inf, True: math.inf}
    for schedule in schedules:
        splits = splits_backward(schedule, ranks, microbatches)
        fewest[splits] = min(fewest[splits], schedule.peak_in_flight(ranks=ranks, microbatches=microbatches))
    return fewest[False], fewest[True]


# Unequal stages may have a smaller bubble than equal stages: bounds contain only this share of equal stages' bubble.
_BUBBLE_SHARE = 0.8


# Recipes whose times differ by less than this share count as equally fast: the planner's median error is larger
# (docs/planner-accuracy.md).
NEAR = 0.03
# `best` looks at this many recipes more than it returns, to find one with fewer axes.
_LOOKED = 100


def axes_of(layout: Layout) -> int:
    """Number of axes with a degree above 1; expert parallelism counts as an axis."""
    return sum(degree > 1 for degree in (*layout.degrees().values(), layout.expert))


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One recipe with its estimates: the time of a step; and the memory and reserved bytes of its fullest rank."""

    point: SpacePoint
    recipe: Recipe
    time: StepTime
    memory: RankMemory
    reserved: int


@dataclass(kw_only=True)
class RecipeRanking:
    """The recipes of a space in the order of their speed.

    Attributes:
        listed: number of recipes in the space, once `best` has run.
        too_large: number of recipes that do not fit, among those that were looked at.
        least: the smallest memory of a recipe that does not fit, with that recipe.
        refused: rule → number of recipes that break it, among those that were looked at.
    """

    space: LayoutSpace
    machine: Machine
    limit: float
    listed: int = 0
    too_large: int = 0
    least: tuple[int, Recipe] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    _known_passes: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    def best(self, count: int) -> list[Ranked]:
        """The fastest recipes, in order of speed after the first. The first is the recipe with the fewest axes of all
        within `NEAR` of the fastest, because estimates cannot tell which of these recipes is faster.
        """
        found: list[Ranked] = []
        for ranked in itertools.islice(self._in_order(), count + _LOOKED):
            if ranked.time.seconds > (1 + NEAR) * (found or [ranked])[0].time.seconds and len(found) >= count:
                break
            found.append(ranked)
        if not found:
            return []
        near = [each for each in found if each.time.seconds <= (1 + NEAR) * found[0].time.seconds]
        # Among recipes with equally many axes, the fastest comes first.
        first = min(near, key=lambda ranked: axes_of(ranked.recipe.layout))
        return [first, *(ranked for ranked in found if ranked is not first)][:count]

    def estimate(self, point: SpacePoint) -> Ranked | None:
        """The estimates of one recipe; None: the recipe does not fit."""
        recipe = self.space.recipe_of(point)
        memory = most_memory(recipe)
        reserved = reserved_bytes(recipe, self.machine, memory)
        if reserved > self.limit and recipe.layout.fsdp > 1 and self._may_reduce_each(recipe):
            recipe = reducing_each(recipe)
            memory = most_memory(recipe)
            reserved = reserved_bytes(recipe, self.machine, memory)
        if reserved > self.limit:
            self._leave_out(reserved, recipe, 1)
            return None
        time = step_time(recipe, self.machine)
        return Ranked(point=point, recipe=recipe, time=time, memory=memory, reserved=reserved)

    def _may_reduce_each(self, recipe: Recipe) -> bool:
        """Whether the planner may choose to reduce gradients after each microbatch: with `auto`, without a pipeline."""
        is_open = self.space.recipe.parallelism.reduce_gradients == "auto"
        return is_open and recipe.microbatches > 1 and recipe.layout.pipeline == 1

    def _in_order(self) -> Iterator[Ranked]:
        counter = itertools.count()
        queue: list[tuple[float, int, Any]] = []

        def push(bound: float, item: Any) -> None:
            heapq.heappush(queue, (bound, next(counter), item))

        for bound, groups in self._families():
            push(bound, (self._refine_family, groups))
        while queue:
            _, _, (refine, item) = heapq.heappop(queue)
            if refine is None:
                rule = self.space.broken_rule(item.recipe)
                if rule:
                    self.refused[rule] += 1
                else:
                    yield item
                continue
            for bound, following in refine(item):
                push(bound, following)

    def _leave_out(self, needed: int, recipe: Recipe, count: int) -> None:
        self.too_large += count
        if self.least is None or needed < self.least[0]:
            self.least = (needed, recipe)

    def _families(self) -> Iterator[tuple[float, list[RecipeGroup]]]:
        """Lists of groups that compute the same, each with a bound: their time on one process / number of processes."""
        space, by_degrees = self.space, dict[tuple[int, ...], list[Layout]]()
        for layout in space.layouts():
            by_degrees.setdefault((layout.pipeline, layout.context, layout.tensor, layout.expert), []).append(layout)
        self.listed = self.too_large = 0
        self.refused.clear()
        self._known_passes.clear()
        others, by_microbatch = list(space.others()), dict[int, list[tuple[Layout, ...]]]()
        for layouts in map(tuple, by_degrees.values()):
            for microbatch, schedules in space.microbatches(layouts[0]):
                self.listed += len(layouts) * len(schedules) * len(others)
                by_microbatch.setdefault(microbatch, []).append(layouts)
        alone = Layout(shard=space.world)
        for (microbatch, degrees), other in itertools.product(by_microbatch.items(), others):
            groups = [RecipeGroup(layouts, microbatch, *other) for layouts in degrees]
            count = space.recipe.training.global_batch / microbatch
            yield count * sum(self._passes(groups[0], alone)) / space.world, groups

    def _fits(self, group: RecipeGroup, schedules: Sequence[Choice]) -> bool:
        """Whether a recipe of the group may fit into memory; if none may, all its recipes are counted as too large."""
        recipe = self.space.recipe_of(group.point(group.layouts[0], schedules[0]))
        each = recipe.reduces_each or self._may_reduce_each(recipe)
        needed = self.machine.reserved_bytes(least_memory(recipe, schedules, reduces_each=each))
        if needed > self.limit:
            self._leave_out(needed, recipe, len(group.layouts) * len(schedules))
        return needed <= self.limit

    def _passes(self, group: RecipeGroup, layout: Layout) -> tuple[float, float]:
        """Seconds of one microbatch through all pieces on a layout: of the forward pass, and of the backward pass."""
        choices = (id(choice.value) for choice in (group.ac, group.precision, group.compile))
        key = (layout.context, layout.tensor, layout.expert, group.microbatch, *choices)
        if key not in self._known_passes:
            recipe = self.space.recipe_of(group.point(layout, self.space.schedules(layout)[0]))
            whole = model_time(recipe, self.machine).whole
            self._known_passes[key] = whole.ahead, whole.back
        return self._known_passes[key]

    def _stragglers(self, layout: Layout) -> float:
        nodes = axis_of(layout, "world", self.machine.per_node).nodes
        return 1 + self.machine.efficiencies.stragglers * math.log2(nodes)

    def _refine_family(self, groups: Sequence[RecipeGroup]) -> Iterator[tuple[float, Any]]:
        """The groups of a family, with bounds of the time without a bubble."""
        batch = self.space.recipe.training.global_batch
        for group in groups:
            layout = group.layouts[0]
            passes = batch / layout.data / group.microbatch * sum(self._passes(group, layout))
            yield passes / layout.pipeline * self._stragglers(layout), (self._refine_group, group)

    def _refine_group(self, group: RecipeGroup) -> Iterator[tuple[float, Any]]:
        """The group with each schedule, with bounds of the pipeline's time."""
        layout = group.layouts[0]
        count = self.space.recipe.training.global_batch // layout.data // group.microbatch
        schedules = self.space.schedules(layout, count)
        if not self._fits(group, schedules):
            return
        ahead, back = self._passes(group, layout)
        for schedule in schedules:
            passes = ahead if splits_backward(schedule.value, layout.pipeline, count) else ahead + back
            # Share of the stages that a microbatch passes before it has reached each rank.
            placement = placement_of(schedule.value, layout.pipeline)
            before = max(map(placement.index, set(placement))) / len(placement)
            bound = count * (ahead + back) / layout.pipeline + _BUBBLE_SHARE * passes * before
            yield bound * self._stragglers(layout), (self._refine_schedule, (group, schedule))

    def _refine_schedule(self, item: tuple[RecipeGroup, Choice]) -> Iterator[tuple[float, Any]]:
        """The group with one schedule, with a bound that holds for all of its layouts."""
        group, schedule = item
        layout = group.layouts[0]
        if layout.pipeline > 1 and not self._fits(group, [schedule]):
            return
        recipe = self.space.recipe_of(group.point(layout, schedule))
        try:
            blocks = blocks_time(recipe, self.machine, least_time)
        except ConfigError as error:
            self.refused[f"{error.key} {error.rule}"] += len(group.layouts)
            return
        yield least_seconds(recipe, self.machine, blocks), (self._refine_layouts, (group, schedule, blocks))

    def _refine_layouts(self, item: tuple[RecipeGroup, Choice, BlocksTime]) -> Iterator[tuple[float, Any]]:
        """The recipes with one schedule, with bounds of the whole step."""
        group, schedule, blocks = item
        for layout in group.layouts:
            recipe = self.space.recipe_of(group.point(layout, schedule))
            least = step_time(recipe, self.machine, blocks=blocks).seconds
            if layout.fsdp > 1 and self._may_reduce_each(recipe):
                least = min(least, step_time(reducing_each(recipe), self.machine, blocks=blocks).seconds)
            yield least, (self._refine_recipe, group.point(layout, schedule))

    def _refine_recipe(self, point: SpacePoint) -> Iterator[tuple[float, Any]]:
        """The estimate of one recipe, if it fits."""
        if (ranked := self.estimate(point)) is not None:
            yield ranked.time.seconds, (None, ranked)

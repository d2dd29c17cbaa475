"""The fastest recipes of a space among those that fit into memory, without estimating all of them.

A search from the best bound on (best-first): every group of recipes has a bound below which the time of none of them
can be. The group with the smallest bound is refined, from a bound of its computation to one with its communication
inside blocks, then to recipes with a pipeline's schedule, then to estimates. The first estimate that comes out is that
of the fastest recipe.
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

from titanlab.costs.account import Share
from titanlab.costs.layout import Layout
from titanlab.errors import ConfigError
from titanlab.planner.activations import Batch, block_bytes
from titanlab.planner.in_flight import peaks
from titanlab.planner.machine import Machine, axis_of
from titanlab.planner.memory import RankMemory, most_memory
from titanlab.planner.model_facts import Key, key_of, model_facts
from titanlab.planner.search.space import Choice, Point, Space
from titanlab.planner.step_time import StepTime, step_time
from titanlab.planner.stored import PieceBytes, Sharding, added, stored_pieces
from titanlab.planner.timing.block_time import ModelTime, model_time, shape_of
from titanlab.recipe.recipe import Recipe

# The estimate of a pipeline rounds the times of its stages, so that it may be below a bound by this share of the
# bound's bubble.
_BUBBLE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One recipe with its estimates.

    Attributes:
        point: of the space.
        recipe: resolved.
        time: of a step.
        memory: of the rank that needs most.
        reserved: bytes that the allocator takes on that rank.
    """

    point: Point
    recipe: Recipe
    time: StepTime
    memory: RankMemory
    reserved: int


class _Group(NamedTuple):
    """Recipes whose blocks take the same time: degrees without the choice between replicating and sharding."""

    layouts: tuple[Layout, ...]
    microbatch: int
    ac: Choice
    precision: Choice
    compile: Choice

    def point(self, layout: Layout, schedule: Choice) -> Point:
        """One of its recipes."""
        return Point(layout, self.microbatch, schedule, self.ac, self.precision, self.compile)


@dataclass(kw_only=True)
class Ranking:
    """The recipes of a space in the order of their speed.

    Attributes:
        space: of recipes.
        machine: on which they would run.
        limit: bytes of a device that recipes may reserve.
        excess: reserved bytes for each allocated byte.
        listed: number of recipes in the space; after `best`.
        too_large: number of recipes that do not fit, of those that were looked at.
        least: the smallest of those that do not fit, with its recipe.
        refused: number of recipes by the rule that they break, of those that were looked at.
    """

    space: Space
    machine: Machine
    limit: float
    excess: float
    listed: int = 0
    too_large: int = 0
    least: tuple[int, Recipe] | None = None
    refused: Counter[str] = field(default_factory=Counter)

    def best(self, count: int) -> list[Ranked]:
        """The fastest recipes, at most `count`."""
        return list(itertools.islice(self._in_order(), count))

    def estimate(self, point: Point) -> Ranked:
        """The estimates of one recipe."""
        recipe = self.space.recipe_of(point)
        return self._ranked(point, recipe, step_time(recipe, self.machine))

    def _ranked(self, point: Point, recipe: Recipe, time: StepTime) -> Ranked:
        memory = most_memory(recipe)
        return Ranked(point=point, recipe=recipe, time=time, memory=memory, reserved=memory.reserved(self.excess))

    def _in_order(self) -> Iterator[Ranked]:
        counter = itertools.count()
        queue: list[tuple[float, int, Any]] = []

        def push(bound: float, item: Any) -> None:
            heapq.heappush(queue, (bound, next(counter), item))

        for group in self._groups():
            push(self._compute_bound(group), (self._refine_group, group))
        while queue:
            _, _, (refine, item) = heapq.heappop(queue)
            if refine is None:
                point, recipe, time = item
                ranked = self._checked(point, recipe, time)
                if ranked is not None:
                    yield ranked
                continue
            for bound, following in refine(item):
                push(bound, following)

    def _checked(self, point: Point, recipe: Recipe, time: StepTime) -> Ranked | None:
        """The estimates, if the recipe fits and breaks no rule."""
        ranked = self._ranked(point, recipe, time)
        if ranked.reserved > self.limit:
            self._leave_out(ranked.reserved, recipe, 1)
            return None
        rule = self.space.broken_rule(recipe)
        if rule:
            self.refused[rule] += 1
            return None
        return ranked

    def _leave_out(self, needed: int, recipe: Recipe, count: int) -> None:
        self.too_large += count
        if self.least is None or needed < self.least[0]:
            self.least = (needed, recipe)

    def _groups(self) -> Iterator[_Group]:
        """All groups of the space, without those whose smallest possible memory is too much."""
        by_degrees: dict[tuple[int, int, int], list[Layout]] = {}
        for layout in self.space.layouts():
            by_degrees.setdefault((layout.pipeline, layout.context, layout.tensor), []).append(layout)
        self.listed = self.too_large = 0
        self.refused.clear()
        for layouts in by_degrees.values():
            for microbatch, schedules in self.space.microbatches(layouts[0]):
                for ac, precision, compile_ in self.space.others():
                    group = _Group(tuple(layouts), microbatch, ac, precision, compile_)
                    recipes = len(layouts) * len(schedules)
                    self.listed += recipes
                    recipe = self.space.recipe_of(group.point(layouts[0], schedules[0]))
                    needed = round(self._least_memory(group, recipe) * self.excess)
                    if needed > self.limit:
                        self._leave_out(needed, recipe, recipes)
                    else:
                        yield group

    def _least_memory(self, group: _Group, recipe: Recipe, schedule: Choice | None = None) -> float:
        """Bytes that the rank with most memory needs at least.

        Parameters are sharded over all processes that read other sequences, and ranks of a pipeline have equal parts of
        the model.

        Args:
            schedule: of the pipeline, which says how many microbatches a rank keeps; None: one.
        """
        layout, formats = group.layouts[0], recipe.precision.formats()
        sharding = Sharding(
            key_of(recipe.model),
            key_of(recipe.precision),
            key_of(recipe.optimizer),
            layout.tensor,
            layout.data * layout.context,
        )
        whole = _whole(sharding)
        offload = recipe.parallelism.cpu_offload
        needed = 0.0 if offload else float(whole.parameters + whole.optimizer)
        accumulates = recipe.microbatches > 1 or layout.pipeline > 1
        if accumulates and (formats.mixed or layout.context > 1):
            needed += whole.unreduced + (0 if recipe.parallelism.frees_after_forward else whole.gathered)
        share = Share(
            element_bytes=formats.compute_bytes,
            accelerator=recipe.cluster.accelerator,
            tensor=layout.tensor,
            context=layout.context,
            sequence_parallel=recipe.parallelism.sequence_parallel,
        )
        batch = Batch(key_of(recipe.model), key_of(recipe.ac), share, recipe.microbatch, recipe.training.seq_len)
        layers = model_facts(key_of(recipe.model)).account.layers
        saved = _saved(batch, layers)
        kept = 1.0 if schedule is None else _in_flight(key_of(schedule.value), layout.pipeline, recipe.microbatches)
        return (needed + kept * saved) / layout.pipeline

    def _times(self, group: _Group, layout: Layout) -> tuple[Recipe, ModelTime]:
        recipe = self.space.recipe_of(group.point(layout, self.space.schedules(layout)[0]))
        keys = (key_of(recipe.model), key_of(recipe.precision), key_of(recipe.ac))
        return recipe, model_time(shape_of(recipe, self.machine, *keys), recipe)

    def _compute_bound(self, group: _Group) -> float:
        """Seconds of the blocks without parallelism inside them, divided by the processes that share them."""
        layout = group.layouts[0]
        whole = Layout(pipeline=layout.pipeline, shard=self.space.world // layout.pipeline)
        recipe, times = self._times(group, whole)
        ahead, back = _sums(times)
        local = recipe.training.global_batch / layout.data / group.microbatch
        return local * (ahead + back) / (layout.pipeline * layout.context * layout.tensor)

    def _refine_group(self, group: _Group) -> Iterator[tuple[float, Any]]:
        """The schedules of a group, with bounds of the pipeline's time."""
        layout = group.layouts[0]
        recipe, times = self._times(group, layout)
        ahead, back = _sums(times)
        count, ranks = recipe.microbatches, layout.pipeline
        weights = sum(times.kinds[kind].weights for kind in times.kind_of)
        stragglers = 1 + self.machine.efficiencies.stragglers * math.log2(
            axis_of(layout, "world", per_node=self.machine.per_node).nodes
        )
        for schedule in self.space.schedules(layout, count):
            bound = count * (ahead + back) / ranks
            if ranks > 1:
                # The last rank waits until a microbatch has passed the stages before it, and its last gradient has to
                # pass them.
                stages = schedule.value.stage_count(ranks=ranks)
                bound += _BUBBLE_SHARE * (ranks - 1) / stages * (ahead + back - weights)
            yield bound * stragglers, (self._refine_schedule, (group, schedule))

    def _refine_schedule(self, item: tuple[_Group, Choice]) -> Iterator[tuple[float, Any]]:
        """The estimates of the recipes with one schedule."""
        group, schedule = item
        if group.layouts[0].pipeline > 1:
            recipe = self.space.recipe_of(group.point(group.layouts[0], schedule))
            needed = round(self._least_memory(group, recipe, schedule) * self.excess)
            if needed > self.limit:
                self._leave_out(needed, recipe, len(group.layouts))
                return
        for layout in group.layouts:
            point = group.point(layout, schedule)
            recipe = self.space.recipe_of(point)
            try:
                time = step_time(recipe, self.machine)
            except ConfigError as error:
                self.refused[f"{error.key} {error.rule}"] += 1
                continue
            yield time.seconds, (None, (point, recipe, time))


@functools.lru_cache(maxsize=4096)
def _whole(sharding: Sharding) -> PieceBytes:
    """Bytes of one rank for the whole model."""
    return added(stored_pieces(sharding).values())


@functools.lru_cache(maxsize=4096)
def _saved(batch: Batch, layers: int) -> int:
    """Bytes that all blocks keep of one microbatch."""
    return sum(block.saved for block in block_bytes(batch, layers))


@functools.lru_cache(maxsize=4096)
def _in_flight(schedule: Key, ranks: int, microbatches: int) -> float:
    """Microbatches that the rank with most of them keeps, if its stages are equal."""
    found = peaks(schedule, ranks=ranks, microbatches=microbatches)
    # The second half of a moment's numbers are microbatches between the halves of their backward.
    stages = len(found[0][0]) // 2
    return max(sum(moment[:stages]) / stages for rank in found for moment in rank)


@functools.lru_cache(maxsize=65536)
def _sums(times: ModelTime) -> tuple[float, float]:
    """Forward and backward of the whole model for one microbatch."""
    pieces = [*(times.kinds[kind] for kind in times.kind_of), *times.edges.values()]
    return sum(piece.ahead for piece in pieces), sum(piece.back for piece in pieces)


def nearest_that_fits(ranking: Ranking) -> Sequence[Ranked]:
    """The smallest recipe of a space in which none fits."""
    if ranking.least is None:
        return []
    recipe = ranking.least[1]
    own = ranking.space.choices
    point = Point(recipe.layout, recipe.microbatch, Choice("", recipe.schedule), *(c[0] for c in (
        own.acs, own.precisions, own.compiles)))  # fmt: skip
    return [ranking.estimate(point)]

"""A bound of the memory that recipes of a space need, without the account of each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from titanlab.costs.account import Share
from titanlab.costs.config_key import key_of
from titanlab.planner.activations import Batch, deferred_bytes, saved_bytes
from titanlab.planner.model_facts import model_facts
from titanlab.planner.search.group import Group
from titanlab.planner.search.space import Choice, Space
from titanlab.planner.stored import PieceBytes, Sharding, added, stored_pieces
from titanlab.planner.timing.pipeline_bound import splits_backward


class MemoryBound:
    """Bytes that the rank with most memory needs at least, for the groups of one space.

    Parameters are sharded over all processes that read other sequences, and ranks of a pipeline have equal parts of the
    model. What groups share is computed once.
    """

    def __init__(self, space: Space) -> None:
        self._recipe, self._space = space.recipe, space
        self._whole: dict[tuple[int, int, int, int], PieceBytes] = {}
        self._saved: dict[tuple[int, int, int, int, int, int], tuple[float, float]] = {}
        self._kept: dict[tuple[int, ...], tuple[float, float]] = {}

    def least(self, group: Group, schedules: Sequence[Choice]) -> float:
        """Bytes for a group.

        Args:
            schedules: of the pipeline; the one that keeps the fewest microbatches counts.
        """
        layout, parallelism = group.layouts[0], self._recipe.parallelism
        whole = self._stored(group)
        needed = 0.0 if parallelism.cpu_offload else float(whole.parameters + whole.optimizer)
        microbatches = self._recipe.training.global_batch // layout.data // group.microbatch
        accumulates = microbatches > 1 or layout.pipeline > 1
        if accumulates and (layout.context > 1 or group.precision.value.formats().mixed):
            needed += whole.unreduced + (0 if parallelism.frees_after_forward else whole.gathered)
        saved, deferred = self._activations(group)
        if layout.pipeline > 1:
            whole_passes, split_passes = self._in_flight(schedules, layout.pipeline, microbatches)
            saved = min(whole_passes * saved, split_passes * min(saved, deferred))
        return (needed + saved) / layout.pipeline

    def _stored(self, group: Group) -> PieceBytes:
        """What one rank stores and gathers of the whole model."""
        layout = group.layouts[0]
        key = id(group.precision.value), layout.tensor, layout.data * layout.context, layout.expert
        if key not in self._whole:
            model, optimizer = key_of(self._recipe.model), key_of(self._recipe.optimizer)
            sharding = Sharding(model, key_of(group.precision.value), optimizer, *key[1:])
            self._whole[key] = added(stored_pieces(sharding).values())
        return self._whole[key]

    def _activations(self, group: Group) -> tuple[float, float]:
        """What all blocks keep of one microbatch, and what of it between the halves of a split backward."""
        layout, precision = group.layouts[0], group.precision.value
        key = id(group.ac.value), id(precision), layout.tensor, layout.context, group.microbatch, layout.expert
        if key not in self._saved:
            share = Share(
                element_bytes=precision.formats().compute_bytes,
                accelerator=self._recipe.cluster.accelerator,
                tensor=layout.tensor,
                context=layout.context,
                sequence_parallel=self._recipe.parallelism.sequence_parallel,
                expert=layout.expert,
            )
            model, seq_len = key_of(self._recipe.model), self._recipe.training.seq_len
            layers = model_facts(model).account.layers
            batch = Batch(model, key_of(group.ac.value), share, group.microbatch, seq_len)
            self._saved[key] = (
                saved_bytes(batch, layers),
                layers * deferred_bytes(model, share, group.microbatch, seq_len)[""],
            )
        return self._saved[key]

    def _in_flight(self, schedules: Sequence[Choice], ranks: int, microbatches: int) -> tuple[float, float]:
        """Microbatches that the rank with most of them keeps, if its stages are equal, in the schedule with fewest.

        The first number is of schedules with whole backward passes, the second of those that split them; infinite
        without such a schedule.
        """
        key = (ranks, microbatches, *map(id, schedules))
        if key not in self._kept:
            fewest = {False: math.inf, True: math.inf}
            for schedule in schedules:
                splits = splits_backward(key_of(schedule.value), ranks, microbatches)
                kept = schedule.value.peak_in_flight(ranks=ranks, microbatches=microbatches)
                fewest[splits] = min(fewest[splits], kept)
            self._kept[key] = fewest[False], fewest[True]
        return self._kept[key]

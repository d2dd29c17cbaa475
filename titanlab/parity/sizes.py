"""The sizes of reduced recipes: the least that their layouts, schedules and precisions need. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.costs.layout import Layout
from titanlab.errors import ConfigError
from titanlab.model.contract import ReducedSizes
from titanlab.parity.folding import folded
from titanlab.recipe.recipe import Recipe
from titanlab.schedule.contract import PipelineSchedule

_VOCABULARY = 256
_LEAST_WIDTH = 64
_LEAST_SEQUENCE = 32
_LEAST_HEAD = 8
_MOST_HEAD = 512
_MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that reduced recipes share, so that they train on the same model and data."""

    model: ReducedSizes
    seq_len: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A resolved recipe, and a layout of few processes in which it is reduced.

    Attributes:
        run: name of its run.
        recipe: in its real size.
        layout: folded.
        inductor: keep the compiler of compiled blocks; otherwise they are traced and compiled without new kernels.
    """

    run: str
    recipe: Recipe
    layout: Layout
    inductor: bool = False

    @property
    def microbatches(self) -> int:
        """Microbatches of a step: as many as the schedule needs, at most as many as in the real size."""
        real: int = self.recipe.microbatches
        ranks = self.layout.pipeline
        if ranks == 1:
            return min(real, 2)
        if self.recipe.schedule.fixed_size() is not None:
            return real
        most = min(real, 2 * ranks)
        for count in (*range(most, 4 * ranks + 1), *range(most, 0, -1)):
            if _runs(self.recipe.schedule, ranks, count):
                return int(count)
        return int(most)


def fold_recipe(run: str, recipe: Recipe, *, most: int, inductor: bool = False) -> list[Folded]:
    """A resolved recipe in layouts of at most `most` processes, in which every axis is exercised.

    Raises:
        ConfigError: an axis cannot be folded.
    """
    schedule = recipe.schedule
    fixed = {"pipeline": f"schedule={schedule.kind} is for so many ranks"} if schedule.fixed_size() is not None else {}
    layouts = folded(recipe.layout, most=most, fixed=fixed)
    return [Folded(run=run, recipe=recipe, layout=layout, inductor=inductor) for layout in layouts]


def common_sizes(group: Sequence[Folded]) -> Sizes:
    """Sizes with which all of these can be reduced; their models must be equal.

    Raises:
        ConfigError: there are none.
    """
    model = group[0].recipe.model
    account = model.account()
    tensor = math.lcm(*(case.layout.tensor for case in group))
    kv_heads = tensor * (2 if any(_kv_heads(case) >= 2 for case in group) else 1)
    shared = account.heads // account.kv_heads
    heads = kv_heads * (shared if shared <= 2 else 4 if kv_heads <= 2 else 2)
    units = [_unit(case) for case in group]
    parts = [kv_heads // case.layout.tensor for case in group]

    def fits(head_dim: int) -> bool:
        width = heads * head_dim
        rows = all(part * head_dim % unit == 0 for part, unit in zip(parts, units, strict=True))
        return (
            rows
            and width >= _LEAST_WIDTH
            and all(
                width % (case.layout.fsdp * unit) == 0
                for case, unit in zip(group, units, strict=True)
                if case.layout.tensor > 1
            )
        )

    head_dim = next((dim for dim in range(_LEAST_HEAD, _MOST_HEAD + 1, 2) if fits(dim)), None)
    unit = math.lcm(*(unit * case.layout.tensor * case.layout.fsdp for case, unit in zip(group, units, strict=True)))
    if head_dim is None:
        rule = "has no small head that all these layouts can cut"
        raise ConfigError("model", model.kind, rule, "prove fewer of them at once")
    sizes = ReducedSizes(
        layers=max(_layers(case) for case in group),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=-(-2 * heads * head_dim // unit) * unit,
        vocab_size=_vocabulary(group, unit),
        unit=math.lcm(*units, *(case.layout.fsdp for case in group)),
    )
    return Sizes(model=sizes, seq_len=_sequence(group), global_batch=_batch(group))


def _runs(schedule: PipelineSchedule, ranks: int, microbatches: int) -> bool:
    try:
        schedule.check_pipeline(ranks=ranks, microbatches=microbatches)
        schedule.actions(ranks=ranks, microbatches=microbatches)
    except ConfigError:
        return False
    return True


def _kv_heads(case: Folded) -> int:
    """Key/value heads of a process in the real size."""
    return case.recipe.model.account().kv_heads // case.recipe.layout.tensor


def _unit(case: Folded) -> int:
    """Every process's part of a matrix has a multiple of so many rows."""
    precision = case.recipe.precision
    multiple = math.lcm(2, precision.multiple)
    if precision.float8_gathered(case.recipe.model.account()):
        return math.lcm(multiple, case.layout.fsdp)
    return multiple


def _layers(case: Folded) -> int:
    """A block for each stage; two where stages are few, so that blocks of one stage follow each other."""
    if case.layout.pipeline == 1:
        return 2
    stages = len(case.recipe.schedule.placement(ranks=case.layout.pipeline))
    if stages > _MOST_LAYERS:
        rule = f"makes {stages} stages of {case.layout.pipeline} ranks, each of which needs a block"
        raise ConfigError("schedule", case.recipe.schedule.kind, rule, "prove it with fewer stages a rank")
    return 2 * stages if stages <= 2 else stages


def _vocabulary(group: Sequence[Folded], unit: int) -> int:
    """Rows of the embedding; not divisible by the degree of tensor parallelism where the original's are not."""
    rows = -(-_VOCABULARY // unit) * unit
    uneven = any(case.recipe.model.vocab_size % case.recipe.layout.tensor for case in group)
    return rows + 1 if uneven and not any(_converts_head(case.recipe) for case in group) else rows


def _converts_head(recipe: Recipe) -> bool:
    account = recipe.model.account()
    return bool(account.pieces) and account.pieces[-1] in recipe.precision.products(account)


def _sequence(group: Sequence[Folded]) -> int:
    """Tokens of a sequence: two chunks for each context-parallel process, and equal parts for tensor parallelism."""
    unit = math.lcm(
        *(2 * case.layout.context for case in group),
        *(case.layout.context * case.layout.tensor for case in group),
        *(case.layout.context * case.recipe.precision.multiple for case in group),
    )
    return -(-_LEAST_SEQUENCE // unit) * unit


def _batch(group: Sequence[Folded]) -> int:
    batch = math.lcm(*(case.layout.data * case.microbatches for case in group))
    # Of four sequences in a row, each has another number of labels that count.
    return batch * max(1, 4 // batch)

"""The bytes that ranks store, keep and send in a step: traced on a CPU, and as declared. Torch-free."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from titanlab.costs import AXES
from titanlab.errors import ConfigError
from titanlab.prove.declared import RankAccount, declared
from titanlab.recipe import Recipe, check_all_but_data
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile


@dataclass(frozen=True, kw_only=True)
class DeclaredFigure:
    """One number of a rank, as declared and as traced."""

    rank: int
    name: str  # `parameters of its stages`, `parameter bytes`, `block 3: saved bytes`, `shard all_gather bytes`, …
    declared: int
    traced: int

    @property
    def difference(self) -> int:
        """Traced minus declared."""
        return self.traced - self.declared


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """What ranks of one recipe declare, and what was traced."""

    recipe: Recipe
    notes: Sequence[str]  # one line for each difference from the requested recipe
    pairs: Sequence[tuple[RankAccount, RankAccount]]  # for each rank, its account as declared and as traced

    @functools.cached_property
    def items(self) -> list[DeclaredFigure]:
        """All numbers, rank by rank."""
        return [
            DeclaredFigure(rank=traced.rank, name=name, declared=expected, traced=actual)
            for declared, traced in self.pairs
            for name, (expected, actual) in _figures(declared, traced).items()
        ]

    @property
    def differing(self) -> list[DeclaredFigure]:
        return [item for item in self.items if item.difference]


def _figures(declared: RankAccount, traced: RankAccount) -> dict[str, tuple[int, int]]:
    """The (declared, traced) numbers of a rank, by name; neighbouring blocks with the same numbers share a name."""
    found = {
        "parameters of its stages": (declared.parameters, traced.parameters),
        "parameter bytes": (declared.parameter_bytes, traced.parameter_bytes),
        "optimizer bytes": (declared.optimizer_bytes, traced.optimizer_bytes),
    }
    blocks: list[tuple[int, int, tuple[int, int]]] = []
    for number in sorted({*declared.saved, *traced.saved}):
        saved, first = (declared.saved.get(number, 0), traced.saved.get(number, 0)), number
        if blocks and blocks[-1][1:] == (number - 1, saved):
            first = blocks.pop()[0]
        blocks.append((first, number, saved))
    for first, last, saved in blocks:
        name = f"block {first}" if first == last else f"each of blocks {first} to {last}"
        found[f"{name}: saved bytes"] = saved
    ours, theirs = ({(row.axis, row.kind): row for row in account.traffic} for account in (declared, traced))
    for axis, kind in dict.fromkeys((*ours, *theirs)):
        for figure in ("count", "bytes"):
            expected, actual = (getattr(rows.get((axis, kind)), figure, 0) for rows in (ours, theirs))
            found[f"{axis} {kind} {figure}"] = expected, actual
    return found


def comparison_rows(items: Sequence[DeclaredFigure]) -> list[list[str]]:
    """For each number, a table row of texts: rank, name, declared, traced, difference."""
    rows = []
    for item in items:
        difference = f"{item.difference:+,}" if item.difference else "0"
        rows.append([str(item.rank), item.name, f"{item.declared:,}", f"{item.traced:,}", difference])
    return rows


def comparison_values(comparison: TraceComparison) -> dict[str, Any]:
    return {
        "layout": comparison.recipe.layout.label,
        "notes": list(comparison.notes),
        "equal": not comparison.differing,
        "items": [asdict(item) | {"difference": item.difference} for item in comparison.items],
        "optimizer_traffic": {
            str(traced.rank): [asdict(row) for row in traced.update_traffic] for _, traced in comparison.pairs
        },
    }


# Trace at least two: the first microbatch accumulates gradients, and after the last one they are reduced.
_MICROBATCHES = 2
# Limits memory: each process has imported torch and holds a stage's modules.
_MOST_PROCESSES = 8


def trace(recipe: Recipe, ranks: Sequence[int] | None = None) -> TraceComparison:
    """Trace ranks of a resolved recipe, each in a separate process, and compare them with their declarations.

    Args:
        ranks: ranks of the world; None: those of `different_ranks`.

    Raises:
        ConfigError: the recipe breaks a rule, cannot be traced, or has no such rank.
    """
    check_all_but_data(recipe)
    recipe, notes = for_tracing(recipe)
    if ranks is None:
        chosen, skipped = different_ranks(recipe)
        notes += skipped
    else:
        chosen = list(dict.fromkeys(ranks))
    for rank in chosen:
        if not 0 <= rank < recipe.layout.world:
            rule = f"must lie in [0, {recipe.layout.world})"
            raise ConfigError("--rank", rank, rule, f"try {min(max(rank, 0), recipe.layout.world - 1)}")
    processes = min(len(chosen), os.cpu_count() or 1, _MOST_PROCESSES)
    # Spawned, because a fork would copy the threads' locks of this process.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        traced = list(pool.map(_trace_rank, [recipe] * len(chosen), chosen))
    return TraceComparison(recipe=recipe, notes=notes, pairs=tuple((declared(recipe, own.rank), own) for own in traced))


def _trace_rank(recipe: Recipe, rank: int) -> RankAccount:
    # Imported here, in the process of the rank: it imports torch.
    from titanlab.prove.rank_trace import trace_rank

    return trace_rank(recipe, rank)


def different_ranks(recipe: Recipe) -> tuple[list[int], tuple[str, ...]]:
    """For each pipeline rank, its first rank in the world, unless an earlier one declares the same; notes on those."""
    layout = recipe.layout
    chosen: dict[str, int] = {}
    same: dict[int, list[int]] = {}
    inner = math.prod(degree for axis, degree in layout.degrees().items() if axis != AXES[0])
    for rank in range(0, layout.world, inner):
        account = declared(recipe, rank)
        # Ignore which blocks a rank has: ranks with different blocks may declare the same bytes.
        key = repr((replace(account, rank=0, saved={}), sorted(account.saved.values())))
        if key in chosen:
            same.setdefault(chosen[key], []).append(rank)
        else:
            chosen[key] = rank
    notes = (
        f"rank {first} stands for {', '.join(map(str, others))}, whose declarations are the same"
        for first, others in same.items()
    )
    return list(chosen.values()), tuple(notes)


def for_tracing(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that is traced, and one line for each difference from the given one.

    Raises:
        ConfigError: the recipe cannot be traced.
    """
    is_gpu = recipe.cluster.accelerator == "cuda"
    notes = ["attention and norms are traced with CPU kernels, and keep what those keep"] if is_gpu else []
    if recipe.parallelism.cpu_offload and is_gpu:
        rule = "copies between two devices, and a trace has one"
        raise ConfigError("parallelism.cpu_offload", True, rule, "try parallelism.cpu_offload=false")
    if recipe.layout.data_parallelism(mixed=recipe.precision.formats().mixed) == "ddp":
        rule = "is DDP in this precision, which reads the values of parameters, and a trace has none"
        cure = "try parallelism.shard, or precision=bf16"
        raise ConfigError("parallelism.replicate", recipe.layout.replicate, rule, cure)
    if recipe.compile.compiles:
        parts = [name for name, on in (("block", recipe.compile.blocks), ("loss", recipe.compile.loss)) if on]
        notes.append(f"compile={'+'.join(parts)} is traced in eager mode")
        if recipe.ac.compiler_budget() is not None:
            notes.append(f"ac={recipe.ac.kind} is the work of a compiler: blocks keep all activations in the trace")
            recipe = replace(recipe, ac=NoCheckpointing())
        recipe = replace(recipe, compile=Compile())
    parallelism = recipe.parallelism
    if recipe.data.document_mask:
        notes.append("data.document_mask=true: attention is traced over whole sequences")
    if parallelism.async_tensor:
        notes.append("AsyncTP communicates the same bytes in pieces: traced as one collective each")
    if parallelism.symmetric_memory:
        notes.append("parallelism.symmetric_memory is memory of NCCL: the same bytes are traced in other memory")
    parallelism = replace(parallelism, async_tensor=False, symmetric_memory=False)
    recipe = replace(recipe, parallelism=parallelism, precision=recipe.precision.emulated())
    if is_gpu and recipe.model.attention not in ("auto", "math"):
        recipe = replace(recipe, model=replace(recipe.model, attention="auto"))
    # Trace as few microbatches as the recipe's rules allow: more would only repeat the same.
    count = recipe.microbatches
    for fewer in range(_MICROBATCHES, count):
        batch = fewer * recipe.microbatch * recipe.layout.data
        training = replace(recipe.training, global_batch=batch, microbatch=recipe.microbatch)
        small = replace(recipe, training=training)
        with contextlib.suppress(ConfigError):
            check_all_but_data(small)
            notes.append(f"{fewer} of {count} microbatches are traced, and the declarations are of such a step")
            return small, tuple(notes)
    return recipe, tuple(notes)

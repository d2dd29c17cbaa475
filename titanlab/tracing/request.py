"""What is traced: a recipe that runs in eager mode on a CPU, with few microbatches, and its ranks. Torch-free."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from titanlab.ac.block_schema import NoCheckpointing
from titanlab.compile.schema import Compile
from titanlab.costs.layout import AXES
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import Recipe
from titanlab.recipe.recipe_rules import check_all_but_data
from titanlab.tracing.comparison import Comparison
from titanlab.tracing.declared import RankAccount, declared

# The first microbatch accumulates gradients, and after the last one they are reduced.
_MICROBATCHES = 2
# An interpreter that has imported torch and holds a stage's modules.
_MOST_PROCESSES = 8


def trace(recipe: Recipe, ranks: Sequence[int] | None = None) -> Comparison:
    """Trace ranks of a resolved recipe, each in a process of its own, and compare them with their declarations.

    Args:
        ranks: None: the first rank of each rank of the pipeline.

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
    return Comparison(recipe=recipe, notes=notes, pairs=tuple((declared(recipe, own.rank), own) for own in traced))


def _trace_rank(recipe: Recipe, rank: int) -> RankAccount:
    # Imported here, in the process of the rank: it imports torch.
    from titanlab.tracing.rank_trace import trace_rank

    return trace_rank(recipe, rank)


def different_ranks(recipe: Recipe) -> tuple[list[int], tuple[str, ...]]:
    """The first rank of each rank of the pipeline, without those whose declarations equal an earlier one's; notes."""
    layout = recipe.layout
    chosen: dict[str, int] = {}
    same: dict[int, list[int]] = {}
    inner = math.prod(degree for axis, degree in layout.degrees().items() if axis != AXES[0])
    for rank in range(0, layout.world, inner):
        account = declared(recipe, rank)
        # Blocks of one size and treatment count alike, whatever their number.
        key = repr((dataclasses.replace(account, rank=0, saved={}), sorted(account.saved.values())))
        if key in chosen:
            same.setdefault(chosen[key], []).append(rank)
        else:
            chosen[key] = rank
    notes = (
        f"rank {first} stands for {_listed(others)}, whose declarations are the same" for first, others in same.items()
    )
    return list(chosen.values()), tuple(notes)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def for_tracing(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as it is traced, and one line for each difference to the recipe itself.

    Raises:
        ConfigError: it cannot be traced.
    """
    notes = ["attention and norms are those of a CPU, and so is what they keep"] if _is_gpu(recipe) else []
    if recipe.parallelism.cpu_offload and _is_gpu(recipe):
        rule = "copies between two devices, and a trace has one"
        raise ConfigError("parallelism.cpu_offload", True, rule, "try parallelism.cpu_offload=false")
    if recipe.layout.data_parallelism(mixed=recipe.precision.formats().mixed) == "ddp":
        rule = "is DDP in this precision, which reads the values of parameters, and a trace has none"
        raise ConfigError(
            "parallelism.replicate", recipe.layout.replicate, rule, "try parallelism.shard, or precision=bf16"
        )
    if recipe.compile.compiles:
        notes.append(f"compile={_compiled(recipe)} is traced in eager mode")
        if recipe.ac.compiler_budget() is not None:
            notes.append(f"ac={recipe.ac.kind} is the compiler's: blocks keep all activations in the trace")
            recipe = dataclasses.replace(recipe, ac=NoCheckpointing())
        recipe = dataclasses.replace(recipe, compile=Compile())
    if recipe.data.document_mask:
        notes.append("data.document_mask=true: attention is traced over whole sequences")
    if recipe.parallelism.async_tensor:
        notes.append("AsyncTP communicates the same bytes in pieces: traced as one collective each")
    if recipe.parallelism.symmetric_memory:
        notes.append("parallelism.symmetric_memory is memory of NCCL: the same bytes are traced in other memory")
    plain = dataclasses.replace(recipe.parallelism, async_tensor=False, symmetric_memory=False)
    recipe = dataclasses.replace(recipe, parallelism=plain)
    recipe = dataclasses.replace(recipe, precision=recipe.precision.emulated())
    if _is_gpu(recipe) and recipe.model.attention not in ("auto", "math"):
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attention="auto"))
    recipe, fewer = _with_few_microbatches(recipe)
    return recipe, (*notes, *fewer)


def _is_gpu(recipe: Recipe) -> bool:
    return recipe.cluster.accelerator == "cuda"


def _compiled(recipe: Recipe) -> str:
    return "+".join(name for name, on in (("block", recipe.compile.blocks), ("loss", recipe.compile.loss)) if on)


def _with_few_microbatches(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """A step of the smallest number of microbatches that the recipe may have; the others repeat what these do."""
    count = recipe.microbatches
    for fewer in range(_MICROBATCHES, count):
        batch = fewer * recipe.microbatch * recipe.layout.data
        training = dataclasses.replace(recipe.training, global_batch=batch, microbatch=recipe.microbatch)
        small = dataclasses.replace(recipe, training=training)
        try:
            check_all_but_data(small)
        except ConfigError:
            continue
        return small, [f"{fewer} of {count} microbatches are traced, and the declarations are of such a step"]
    return recipe, []

"""Reduction: a recipe in a size that trains in a second on a CPU, with the structure of the original. Torch-free.

The layout, the schedule and its stages, activation checkpointing, compiled parts, the optimizer, clipping, tied
embeddings, shared heads and frequencies stay. Layers, widths, vocabulary, sequences and batch shrink to the least
that the layout needs, and what a CPU lacks is replaced by what comes nearest; `Reduced.notes` says what.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlab.ac.block_schema import NoCheckpointing
from titanlab.checkpoint.schema import Off as NoCheckpoints
from titanlab.cluster.schema import Cluster
from titanlab.compile.schema import RECORDING, Compile
from titanlab.costs.layout import Layout
from titanlab.data.synthetic_schema import Synthetic
from titanlab.errors import ConfigError
from titanlab.launch.local_schema import Local
from titanlab.model.contract import ReducedSizes
from titanlab.parallelism.schema import Parallelism
from titanlab.parity.folding import folded
from titanlab.parity.tolerances import LEAST_EPS
from titanlab.precision.fp32_schema import Fp32
from titanlab.profiler.off_schema import Off as NoProfiler
from titanlab.recipe.recipe import Recipe, resolve
from titanlab.recipe.recipe_rules import check
from titanlab.schedule.contract import PipelineSchedule
from titanlab.schedule.one_f_one_b_schema import OneFOneB
from titanlab.tracker.jsonl_schema import Jsonl

_VOCABULARY = 256
_LEAST_WIDTH = 64
_LEAST_SEQUENCE = 32
_LEAST_HEAD = 8
_MOST_HEAD = 512
# A model without a reduced form is taken as it is if it has at most so many parameters.
_SMALL = 5_000_000
_MOST_LAYERS = 64
# Below the norm of a new model's gradient, so that every step is clipped.
_NORM = 0.1
_RATE = 1e-3
_BLOCK = 16
# Attention kernels that a CPU has.
_CPU_KERNELS = ("auto", "flash", "math")
_LAYER = re.compile(r"layers\.(\d+)")


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
        real, ranks = self.recipe.microbatches, self.layout.pipeline
        if ranks == 1:
            return min(real, 2)
        if self.recipe.schedule.kind == "csv":
            return real
        most = min(real, 2 * ranks)
        for count in (*range(most, 4 * ranks + 1), *range(most, 0, -1)):
            if _runs(self.recipe.schedule, ranks, count):
                return count
        return most


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A reduced recipe, resolved and checked.

    Attributes:
        notes: what is not as in the original, apart from sizes.
    """

    recipe: Recipe
    notes: tuple[str, ...]


def fold_recipe(run: str, recipe: Recipe, *, most: int, inductor: bool = False) -> list[Folded]:
    """A resolved recipe in layouts of at most `most` processes, in which every axis is exercised.

    Raises:
        ConfigError: an axis cannot be folded.
    """
    fixed = {"pipeline": "schedule=csv is a file for so many ranks"} if recipe.schedule.kind == "csv" else {}
    layouts = folded(recipe.layout, most=most, fixed=fixed)
    return [Folded(run=run, recipe=recipe, layout=layout, inductor=inductor) for layout in layouts]


def common_sizes(group: Sequence[Folded]) -> Sizes:
    """Sizes with which all of these can be reduced; their models must be equal.

    Raises:
        ConfigError: there are none.
    """
    model = group[0].recipe.model
    account = model.account()
    tensor = math.lcm(*(each.layout.tensor for each in group))
    kv_heads = tensor * (2 if any(_kv_heads(each) >= 2 for each in group) else 1)
    shared = account.heads // account.kv_heads
    heads = kv_heads * (shared if shared <= 2 else 4 if kv_heads <= 2 else 2)
    units = [_unit(each) for each in group]
    parts = [kv_heads // each.layout.tensor for each in group]

    def fits(head_dim: int) -> bool:
        width = heads * head_dim
        rows = all(part * head_dim % unit == 0 for part, unit in zip(parts, units, strict=True))
        return rows and width >= _LEAST_WIDTH and all(width % (each.layout.fsdp * unit) == 0 for each, unit in zip(group, units, strict=True) if each.layout.tensor > 1)

    head_dim = next((dim for dim in range(_LEAST_HEAD, _MOST_HEAD + 1, 2) if fits(dim)), None)
    unit = math.lcm(*(unit * each.layout.tensor * each.layout.fsdp for each, unit in zip(group, units, strict=True)))
    if head_dim is None:
        rule = "has no small head that all these layouts can cut"
        raise ConfigError("model", model.kind, rule, "prove fewer of them at once")
    sizes = ReducedSizes(
        layers=max(_layers(each) for each in group),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=-(-2 * heads * head_dim // unit) * unit,
        vocab_size=_vocabulary(group, unit),
        unit=math.lcm(*units, *(each.layout.fsdp for each in group)),
    )
    return Sizes(model=sizes, seq_len=_sequence(group), global_batch=_batch(group))


def reduce_recipe(each: Folded, sizes: Sizes, *, steps: int, runs: str, saves: bool = False) -> Reduced:
    """The recipe in these sizes.

    Args:
        runs: folder of the run.
        saves: save and validate as the original does, in the second step; otherwise do neither.

    Raises:
        ConfigError: it cannot be reduced.
    """
    recipe, layout = each.recipe, each.layout
    notes = _Notes()
    model = _model(recipe, sizes, notes)
    training = replace(
        recipe.training,
        steps=steps,
        seq_len=sizes.seq_len,
        global_batch=sizes.global_batch,
        microbatch=sizes.global_batch // layout.data // each.microbatches,
        max_grad_norm=None if recipe.training.max_grad_norm is None else min(recipe.training.max_grad_norm, _NORM),
        validate_every=2 if saves and recipe.training.validate_every else 0,
        validation_sequences=sizes.global_batch,
        log_every=1,
        unmeasured_steps=0,
        compare_ranks_every=0,
        check_every=0,
        on_nan="stop",
        step_timeout_seconds=180.0,
        first_step_timeout_seconds=600.0,
    )
    made = replace(
        recipe,
        name=_name(each),
        sweep="reduced",
        runs=runs,
        repeat=0,
        world=layout.world,
        init_from=None,
        training=training,
        model=model,
        parallelism=_parallelism(each, notes),
        precision=_precision(recipe, model.account().layers, notes),
        ac=_checkpointing(recipe, notes),
        compile=_compiled(each, notes),
        optimizer=_optimizer(recipe, steps),
        data=Synthetic(vocab_size=model.vocab_size, gaps=True),
        checkpoint=_checkpoint(recipe, notes) if saves else NoCheckpoints(),
        cluster=Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0),
        tracker=Jsonl(),
        profiler=NoProfiler(),
        launch=Local(threads=1),
    )
    try:
        made = resolve(made, world=None, accelerator="cpu", device="cpu")
        check(made)
    except ConfigError as error:
        rule = f"cannot be reduced to {layout.label}: {error.key}={error.value} {error.rule}"
        raise ConfigError("recipe", each.run, rule, "prove it in its own size: titanlab train, with few steps") from error
    return Reduced(recipe=made, notes=tuple(notes.lines))


def in_fp32(recipe: Recipe) -> Recipe:
    """A reduced recipe in fp32."""
    return replace(recipe, precision=Fp32())


def on_one_process(recipe: Recipe) -> Recipe:
    """The reference of a reduced recipe: one process, the whole batch at once, nothing recomputed, nothing compiled."""
    plain = replace(
        recipe,
        name="reference",
        world=1,
        training=replace(recipe.training, microbatch=None),
        parallelism=Parallelism(),
        schedule=OneFOneB(),
        ac=NoCheckpointing(),
        compile=Compile(),
        checkpoint=NoCheckpoints(),
    )
    return resolve(plain, world=None, accelerator="cpu", device="cpu")


def comparable(recipe: Recipe) -> dict[str, Any]:
    """What recipes must have in common to train the same: model, data, batch, optimizer, clipping, order of data."""
    training = recipe.training
    return {
        **{f"model.{key}": value for key, value in dataclasses.asdict(recipe.model).items() if key != "attention"},
        "training.seq_len": training.seq_len,
        "training.global_batch": training.global_batch,
        "training.max_grad_norm": training.max_grad_norm,
        **{f"optimizer.{key}": value for key, value in dataclasses.asdict(recipe.optimizer).items()},
        **{f"data.{key}": value for key, value in dataclasses.asdict(recipe.data).items()},
        "seed": recipe.seed,
    }


class _Notes:
    """Collects what is not as in the original."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)


def _runs(schedule: PipelineSchedule, ranks: int, microbatches: int) -> bool:
    try:
        schedule.check_pipeline(ranks=ranks, microbatches=microbatches)
        schedule.actions(ranks=ranks, microbatches=microbatches)
    except ConfigError:
        return False
    return True


def _kv_heads(each: Folded) -> int:
    """Key/value heads of a process in the real size."""
    return each.recipe.model.account().kv_heads // each.recipe.layout.tensor


def _unit(each: Folded) -> int:
    """Every process's part of a matrix has a multiple of so many rows."""
    multiple: int = getattr(each.recipe.precision, "multiple", 2)
    if getattr(each.recipe.precision, "gathers_float8", False):
        return math.lcm(multiple, each.layout.fsdp)
    return multiple


def _layers(each: Folded) -> int:
    """A block for each stage; two where stages are few, so that blocks of one stage follow each other."""
    if each.layout.pipeline == 1:
        return 2
    stages = len(each.recipe.schedule.placement(ranks=each.layout.pipeline))
    if stages > _MOST_LAYERS:
        rule = f"makes {stages} stages of {each.layout.pipeline} ranks, each of which needs a block"
        raise ConfigError("schedule", each.recipe.schedule.kind, rule, "prove it with fewer stages a rank")
    return 2 * stages if stages <= 2 else stages


def _vocabulary(group: Sequence[Folded], unit: int) -> int:
    """Rows of the embedding; not divisible by the degree of tensor parallelism where the original's are not."""
    rows = -(-_VOCABULARY // unit) * unit
    uneven = any(each.recipe.model.vocab_size % each.recipe.layout.tensor for each in group)
    return rows + 1 if uneven and not any(_converts_head(each.recipe) for each in group) else rows


def _converts_head(recipe: Recipe) -> bool:
    products = getattr(recipe.precision, "products", None)
    account = recipe.model.account()
    return products is not None and bool(account.pieces) and account.pieces[-1] in products(account)


def _sequence(group: Sequence[Folded]) -> int:
    """Tokens of a sequence: two chunks for each context-parallel process, and equal parts for tensor parallelism."""
    unit = math.lcm(
        *(2 * each.layout.context for each in group),
        *(each.layout.context * each.layout.tensor for each in group),
        *(each.layout.context * getattr(each.recipe.precision, "multiple", 1) for each in group),
    )
    return -(-_LEAST_SEQUENCE // unit) * unit


def _batch(group: Sequence[Folded]) -> int:
    batch = math.lcm(*(each.layout.data * each.microbatches for each in group))
    # Of four sequences in a row, each has another number of labels that count.
    return batch * max(1, 4 // batch)


def _model(recipe: Recipe, sizes: Sizes, notes: _Notes) -> Any:
    model = recipe.model
    reduced = model.reduced(sizes.model)
    if reduced is None:
        count = model.account().parameter_count
        if count > _SMALL:
            rule = f"has {count:,} parameters, and its config has no method that reduces them"
            raise ConfigError("model", model.kind, rule, "add `reduced` to it (docs/models-of-your-own.md)")
        notes.add(f"model={model.kind} is taken as it is: {count:,} parameters")
        reduced = model
    if reduced.attention not in _CPU_KERNELS:
        notes.add(f"model.attention={reduced.attention} needs a GPU: auto")
        reduced = replace(reduced, attention="auto")  # type: ignore[type-var]
    return reduced


def _parallelism(each: Folded, notes: _Notes) -> Parallelism:
    config = each.recipe.parallelism
    if config.async_tensor:
        notes.add("parallelism.async_tensor needs GPUs: the same collectives, not interleaved with products")
    if config.split is not None:
        notes.add("parallelism.split is for the real number of layers: stages are balanced")
    return replace(config, async_tensor=False, split=None).with_degrees(each.layout.degrees())


def _precision(recipe: Recipe, layers: int, notes: _Notes) -> Any:
    precision: Any = recipe.precision
    changes: dict[str, Any] = {}
    if getattr(precision, "emulate", "auto") == "false":
        changes["emulate"] = "auto"
    if hasattr(precision, "emulate"):
        notes.add(f"precision={precision.kind} is emulated: the same rounding, in 32 bits")
    for name in ("skip", "fp32_parts"):
        given = getattr(precision, name, [])
        kept = [part for part in given if (found := _LAYER.search(part)) is None or int(found[1]) < layers]
        if kept != given:
            notes.add(f"precision.{name} names blocks that the reduced model lacks")
            changes[name] = kept
    return replace(precision, **changes)


def _checkpointing(recipe: Recipe, notes: _Notes) -> Any:
    every: int = getattr(recipe.ac, "every", 1)
    if every <= 2:
        return recipe.ac
    notes.add(f"ac.every={every} is more than the blocks allow: 2")
    return replace(recipe.ac, every=2)  # type: ignore[type-var]


def _compiled(each: Folded, notes: _Notes) -> Compile:
    config = each.recipe.compile
    if not config.compiles:
        return config
    backend, mode = config.backend, config.mode
    if backend == "cudagraphs" or (backend == "inductor" and not each.inductor):
        notes.add(f"compile.backend={backend}: traced and compiled by aot_eager, without new kernels")
        backend = "aot_eager"
    if mode in RECORDING or backend != "inductor":
        mode = "default"
    return replace(config, backend=backend, mode=mode)


def _optimizer(recipe: Recipe, steps: int) -> Any:
    optimizer: Any = recipe.optimizer
    changes: dict[str, Any] = {"lr": _RATE, "schedule": replace(optimizer.schedule, warmup_steps=min(1, steps - 1))}
    if hasattr(optimizer, "eps"):
        changes["eps"] = max(optimizer.eps, LEAST_EPS)
    if hasattr(optimizer, "block_size"):
        # Rows of the reduced model are shorter than a usual block.
        changes["block_size"] = _BLOCK
    return replace(optimizer, **changes)


def _checkpoint(recipe: Recipe, notes: _Notes) -> Any:
    config: Any = recipe.checkpoint
    if not (config.every or config.minutes or config.at_end):
        return NoCheckpoints()
    if config.kind == "async_pinned":
        from titanlab.checkpoint.schema import Async

        notes.add("checkpoint=async_pinned copies from GPUs: async")
        config = Async(last=config.last, last_dtype=config.last_dtype, at_end=config.at_end)
    if config.folder is not None:
        notes.add("checkpoint.folder is left alone: the checkpoint is written beside the run")
    return replace(config, every=2, minutes=0.0, keep=1, keep_every=0, load_from=None, folder=None)


def _name(each: Folded) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", each.run).strip("-._")[:60] or "run"
    return f"{safe}-{each.layout.label.replace('·', '-')}"

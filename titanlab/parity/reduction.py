"""Reduction: a recipe in a size that trains in a second on a CPU, with the structure of the original. Torch-free.

The layout, the schedule and its stages, activation checkpointing, compiled parts, the optimizer, clipping, tied
embeddings, shared heads and frequencies stay. Layers, widths, vocabulary, sequences and batch shrink to the least
that the layout needs, and what a CPU lacks is replaced by what comes nearest; `Reduced.notes` says what.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from titanlab.ac.block_schema import NoCheckpointing
from titanlab.checkpoint.contract import CheckpointConfig
from titanlab.checkpoint.schema import Off as NoCheckpoints
from titanlab.compile.schema import RECORDING, Compile
from titanlab.data.synthetic_schema import Synthetic
from titanlab.errors import ConfigError
from titanlab.launch.launchers import on_this_host
from titanlab.model.contract import ModelConfig
from titanlab.optimizer.contract import OptimizerConfig
from titanlab.parallelism.schema import Parallelism
from titanlab.parity.sizes import Folded, Sizes
from titanlab.parity.tolerances import LEAST_EPS
from titanlab.precision.fp32_schema import Fp32
from titanlab.profiler.off_schema import Off as NoProfiler
from titanlab.recipe.recipe import Recipe, resolve
from titanlab.recipe.recipe_rules import check
from titanlab.recipe.schema import Cluster
from titanlab.records.run_folder import safe_name
from titanlab.schedule.one_f_one_b_schema import OneFOneB
from titanlab.tracker.jsonl_schema import Jsonl

# A model without a reduced form is taken as it is if it has at most so many parameters.
_SMALL = 5_000_000
# Below the norm of a new model's gradient, so that every step is clipped.
_NORM = 0.1
_RATE = 1e-3
# Attention kernels that a CPU has.
_CPU_KERNELS = ("auto", "flash", "math")


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A reduced recipe, resolved and checked.

    Attributes:
        notes: what is not as in the original, apart from sizes.
    """

    recipe: Recipe
    notes: tuple[str, ...]


def reduce_recipe(case: Folded, sizes: Sizes, *, steps: int, runs: str, saves: bool = False) -> Reduced:
    """The recipe in these sizes.

    Args:
        runs: folder of the run.
        saves: save and validate as the original does, in the second step; otherwise do neither.

    Raises:
        ConfigError: it cannot be reduced.
    """
    recipe, layout = case.recipe, case.layout
    notes = _Notes()
    model = _model(recipe, sizes, notes)
    training = replace(
        recipe.training,
        steps=steps,
        seq_len=sizes.seq_len,
        global_batch=sizes.global_batch,
        microbatch=sizes.global_batch // layout.data // case.microbatches,
        loss_chunk=_chunk(recipe, case, sizes),
        max_grad_norm=None if recipe.training.max_grad_norm is None else min(recipe.training.max_grad_norm, _NORM),
        validate_every=2 if saves and recipe.training.validate_every else 0,
        validation_sequences=sizes.global_batch,
        log_every=1,
        unmeasured_steps=0,
        compare_ranks_every=0,
        check_every=0,
        on_nan="stop",
        step_timeout_seconds=120.0,
        first_step_timeout_seconds=600.0 if case.inductor else 300.0,
    )
    made = replace(
        recipe,
        name=_name(case),
        sweep="reduced",
        runs=runs,
        repeat=0,
        world=layout.world,
        init_from=None,
        training=training,
        model=model,
        parallelism=_parallelism(case, notes),
        precision=recipe.precision.reduced(layers=model.account().layers, note=notes.add),
        ac=recipe.ac.reduced(note=notes.add),
        compile=_compiled(case, notes),
        optimizer=_optimizer(recipe, steps),
        data=_data(recipe, model.vocab_size, sizes),
        checkpoint=_checkpoint(recipe, notes) if saves else NoCheckpoints(),
        cluster=Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0),
        tracker=Jsonl(),
        profiler=NoProfiler(),
        launch=on_this_host(threads=1),
    )
    try:
        made = resolve(made, world=None, accelerator="cpu", device="cpu")
        check(made)
    except ConfigError as error:
        rule = f"cannot be reduced to {layout.label}: {error.problem}"
        raise ConfigError(
            "recipe", case.run, rule, "prove it in its own size: titanlab train, with few steps"
        ) from error
    return Reduced(recipe=made, notes=tuple(notes.lines))


def _data(recipe: Recipe, vocab_size: int, sizes: Sizes) -> Synthetic:
    if not recipe.data.document_mask:
        return Synthetic(vocab_size=vocab_size, gaps=True)
    # A few documents in each sequence: some of one token, some cut by the sequence's end.
    return Synthetic(vocab_size=vocab_size, gaps=True, document_mask=True, document_tokens=sizes.seq_len // 4)


def _chunk(recipe: Recipe, case: Folded, sizes: Sizes) -> int:
    """Tokens of a chunk of the loss: if the original has chunks, about three in a microbatch."""
    if not recipe.loss_chunk:
        return 0
    layout = case.layout
    microbatch = sizes.global_batch // layout.data // case.microbatches
    return -(-microbatch * sizes.seq_len // layout.context // 3)


def in_fp32(recipe: Recipe) -> Recipe:
    """A reduced recipe in fp32."""
    return replace(recipe, precision=Fp32())


def on_one_process(recipe: Recipe) -> Recipe:
    """The reference of a reduced recipe: one process, the whole batch at once, nothing recomputed, nothing compiled."""
    plain = replace(
        recipe,
        name="reference",
        world=1,
        training=replace(recipe.training, microbatch=None, loss_chunk=0),
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


def _model(recipe: Recipe, sizes: Sizes, notes: _Notes) -> ModelConfig:
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
        reduced = replace(reduced, attention="auto")
    return reduced


def _parallelism(case: Folded, notes: _Notes) -> Parallelism:
    config = case.recipe.parallelism
    if config.async_tensor:
        notes.add("parallelism.async_tensor needs GPUs: the same collectives, not interleaved with products")
    if config.symmetric_memory:
        notes.add("parallelism.symmetric_memory needs GPUs: the same collectives in other memory")
    if config.split is not None:
        notes.add("parallelism.split is for the real number of layers: stages are balanced")
    plain = replace(config, async_tensor=False, symmetric_memory=False, split=None)
    return plain.with_degrees(case.layout.degrees())


def _compiled(case: Folded, notes: _Notes) -> Compile:
    config = case.recipe.compile
    if not config.compiles:
        return config
    backend, mode = config.backend, config.mode
    if backend == "cudagraphs" or (backend == "inductor" and not case.inductor):
        notes.add(f"compile.backend={backend}: traced and compiled by aot_eager, without new kernels")
        backend = "aot_eager"
    if mode in RECORDING or backend != "inductor":
        mode = "default"
    return replace(config, backend=backend, mode=mode)


def _optimizer(recipe: Recipe, steps: int) -> OptimizerConfig:
    optimizer = recipe.optimizer.reduced(least_eps=LEAST_EPS)
    schedule = replace(optimizer.schedule, warmup_steps=min(1, steps - 1))
    return replace(optimizer, lr=_RATE, schedule=schedule)


def _checkpoint(recipe: Recipe, notes: _Notes) -> CheckpointConfig:
    config = recipe.checkpoint
    if not (config.every or config.minutes or config.at_end):
        return NoCheckpoints()
    config = config.reduced(note=notes.add)
    if config.folder is not None:
        notes.add("checkpoint.folder is left alone: the checkpoint is written beside the run")
    return replace(config, every=2, minutes=0.0, keep=1, keep_every=0, load_from=None, folder=None)


def _name(case: Folded) -> str:
    return f"{safe_name(case.run, longest=60)}-{case.layout.label.replace('·', '-')}"

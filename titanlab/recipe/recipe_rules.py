"""The rules that involve several groups of a recipe."""

from __future__ import annotations

import importlib.util

from titanlab.costs.hardware import compute_capability
from titanlab.costs.layout import divisors
from titanlab.costs.setting import Setting
from titanlab.costs.shard_account import account_for
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.recipe import layout_rules
from titanlab.recipe.memory_rules import check_addressable
from titanlab.recipe.recipe import Recipe, needs_whole_logits, pieces_by_stage
from titanlab.records.run_folder import check_name
from titanlab.system.text import counted

SEEDS = 2**63
# Kernels of a GPU that cannot keep attention within documents, without and with context parallelism. FlexAttention can,
# and kernels that take a mask; with context parallelism those that take rows and keys of any number: cuDNN makes a plan
# for each.
_WITHOUT_DOCUMENTS = {False: ("flash", "flash3", "cudnn", "flash_attn"), True: ("cudnn",)}
# Width of a head; torch's kernel refuses narrower ones (torch/_inductor/kernel/flex, torch 2.11 to 2.13).
_NARROWEST_FLEX = 16
# Ten times the largest clusters; up to this number, plans with an entry for every process are still made at once.
MOST_PROCESSES = 1_000_000


def check(recipe: Recipe) -> None:
    """Check a resolved recipe by every rule; rules about the content of the corpus apply after it is prepared.

    Raises:
        ConfigError: the first rule that it breaks.
    """
    check_all_but_data(recipe)
    check_data(recipe)


def check_all_but_data(recipe: Recipe) -> None:
    """Check a resolved recipe by every rule that needs no data.

    Raises:
        ConfigError: the first rule that it breaks.
    """
    rules = (_names, check_addressable, _batch, _processes, _layout_fits, _rate, _nan, _offload, _attention)
    for rule in (*rules, _documents, _check_every, _loss_chunk, _options):
        rule(recipe)
    # Otherwise a missing package would be noticed only after the model has been built.
    recipe.tracker.check_installed()
    recipe.checkpoint.check_installed()


def check_data(recipe: Recipe) -> None:
    """Check a resolved recipe by the rules about data; rules about the content apply after it is prepared.

    Raises:
        ConfigError: the first rule that it breaks.
    """
    source.check(
        recipe.data,
        seq_len=recipe.training.seq_len,
        global_batch=recipe.training.global_batch,
        ranks=recipe.layout.data,
        vocab_size=recipe.model.vocab_size,
        validation_sequences=recipe.training.validation_sequences if recipe.training.validate_every else 0,
    )


def _names(recipe: Recipe) -> None:
    check_name("name", recipe.name)
    check_name("sweep", recipe.sweep)
    if recipe.repeat < 0:
        raise ConfigError("repeat", recipe.repeat, "counts repetitions from 0", "try 0")
    if not 0 <= recipe.seed < SEEDS:
        raise ConfigError("seed", recipe.seed, "must lie in [0, 2⁶³)", "try 0")


def _batch(recipe: Recipe) -> None:
    batch, ranks = recipe.training.global_batch, recipe.layout.data
    if batch % ranks:
        raise ConfigError(
            "training.global_batch",
            batch,
            f"must be a multiple of the {ranks} data-parallel processes",
            f"try {_nearest_multiple(batch, ranks)}",
        )
    if recipe.local_batch % recipe.microbatch:
        usable = divisors(recipe.local_batch)
        raise ConfigError(
            "training.microbatch",
            recipe.microbatch,
            f"must divide the {recipe.local_batch} sequences that one process has of a step",
            f"try {' or '.join(str(n) for n in _closest(usable, recipe.microbatch))}",
        )


def _processes(recipe: Recipe) -> None:
    check_processes(recipe.layout.world)


def check_processes(world: int) -> None:
    """Check that a layout may have so many processes.

    Raises:
        ConfigError: they are too many.
    """
    if world > MOST_PROCESSES:
        rule = f"a layout has at most {MOST_PROCESSES:,} processes"
        raise ConfigError("world", world, rule, "give fewer, by smaller degrees of parallelism")


def _layout_fits(recipe: Recipe) -> None:
    layout, config, seq_len = recipe.layout, recipe.parallelism, recipe.training.seq_len
    account = recipe.model.account()
    kernel = recipe.model.attention
    layout_rules.check_context(layout, account, seq_len=seq_len, kernel=kernel)
    layout_rules.check_expert(layout, config, account)
    account = account_for(account, layout)
    layout_rules.check_tensor(layout, config, account, seq_len=seq_len, microbatch=recipe.microbatch)
    layout_rules.check_async_tensor(
        layout,
        config,
        accelerator=recipe.cluster.accelerator,
        compiled=recipe.compile.blocks and recipe.compile.backend,
    )
    layout_rules.check_symmetric_memory(layout, config, accelerator=recipe.cluster.accelerator)
    if config.symmetric_memory:
        # Imported here: it imports torch, which no rule about layouts needs.
        from titanlab.parallelism import symmetric_buffers

        reason = symmetric_buffers.missing()
        if reason is not None:
            raise ConfigError(symmetric_buffers.KEY, True, *reason)
    layout_rules.check_pipeline(layout, config, account, recipe.schedule, microbatches=recipe.microbatches)
    if layout.pipeline > 1:
        pieces_by_stage(recipe)


def _rate(recipe: Recipe) -> None:
    warmup = recipe.optimizer.schedule.warmup(recipe.training.steps)
    if warmup > recipe.training.steps:
        raise ConfigError(
            "optimizer.schedule.warmup_steps",
            warmup,
            f"is more than the {counted(recipe.training.steps, 'step')} of the run",
            f"try {max(1, recipe.training.steps // 10)}",
        )


def _offload(recipe: Recipe) -> None:
    if recipe.parallelism.cpu_offload and recipe.layout.fsdp == 1:
        raise ConfigError(
            "parallelism.cpu_offload",
            True,
            "moves sharded parameters, and nothing is sharded",
            "try parallelism.shard=2",
        )


def _attention(recipe: Recipe) -> None:
    backend = recipe.model.attention
    if recipe.cluster.accelerator == "cpu" and backend in ("cudnn", "efficient", "flash3", "flash_attn"):
        raise ConfigError("model.attention", backend, "needs a GPU", "try auto, flash or math")
    narrow = ("flash", "cudnn", "flash3", "flash_attn")
    if recipe.cluster.accelerator == "cuda" and backend in narrow and recipe.precision.formats().compute == "float32":
        raise ConfigError(
            "model.attention", backend, "computes in 16 bits only on a GPU", "try precision=bf16, or auto"
        )
    if backend == "flash_attn" and importlib.util.find_spec(backend) is None:
        rule = "is a kernel of the package flash-attn, which is not installed"
        raise ConfigError("model.attention", backend, rule, "pip install flash-attn, or try auto")
    if backend == "flash3":
        # Imported here: it imports torch, which no other rule needs.
        from titanlab.model.kernels.flash3 import missing

        reason = missing(compute_capability(str(recipe.cluster.device)))
        if reason is not None:
            raise ConfigError("model.attention", backend, *reason)


def _documents(recipe: Recipe) -> None:
    if not recipe.data.document_mask:
        return
    if not recipe.model.masks_documents:
        rule = f"model={recipe.model.kind} does not mask documents"
        raise ConfigError("data.document_mask", True, rule, "try false, or see docs/models-of-your-own.md")
    backend = recipe.model.attention
    if recipe.cluster.accelerator == "cuda" and backend in _WITHOUT_DOCUMENTS[recipe.layout.context > 1]:
        rule = f"has no form for documents with context={recipe.layout.context}, and data.document_mask is on"
        raise ConfigError("model.attention", backend, rule, "try auto")
    if recipe.cluster.accelerator == "cuda" and backend == "auto" and recipe.layout.context == 1:
        width = recipe.model.account().head_dim
        if width < _NARROWEST_FLEX:
            rule = f"is FlexAttention with data.document_mask, which on a GPU needs heads of {_NARROWEST_FLEX} or more"
            raise ConfigError("model.attention", backend, f"{rule}, and this model's have {width}", "try efficient")


def _check_every(recipe: Recipe) -> None:
    training = recipe.training
    if training.check_every and recipe.cluster.accelerator == "cuda" and not training.deterministic:
        rule = "compares bits, and without training.deterministic=true kernels of a GPU may give others each time"
        raise ConfigError("training.check_every", training.check_every, rule, "set that too, or try 0")


def _nan(recipe: Recipe) -> None:
    if recipe.training.on_nan == "rollback" and recipe.checkpoint.every == 0:
        rule = "goes back to a checkpoint, and checkpoint.every=0 saves none on the way"
        raise ConfigError("training.on_nan", "rollback", rule, "try checkpoint.every=100, or training.on_nan=skip")


def _loss_chunk(recipe: Recipe) -> None:
    reason = needs_whole_logits(recipe) if recipe.loss_chunk else None
    if reason is not None:
        raise ConfigError("training.loss_chunk", recipe.training.loss_chunk, *reason)


def _options(recipe: Recipe) -> None:
    """Apply the rules that options have about the rest of the recipe."""
    values = setting(recipe)
    options = (recipe.model, recipe.schedule, recipe.precision, recipe.ac, recipe.compile, recipe.optimizer)
    for option in (*options, recipe.data, recipe.checkpoint, recipe.tracker, recipe.profiler, recipe.launch):
        option.check(values)


def setting(recipe: Recipe) -> Setting:
    """The values of a resolved recipe that the rules of options may use."""
    formats = recipe.precision.formats()
    return Setting(
        model=recipe.model.account(),
        layout=recipe.layout,
        seq_len=recipe.training.seq_len,
        microbatch=recipe.microbatch,
        accelerator=recipe.cluster.accelerator,
        device=str(recipe.cluster.device),
        compiled=recipe.compile.backend if recipe.compile.blocks else "",
        sequence_parallel=recipe.parallelism.sequence_parallel,
        cpu_offload=recipe.parallelism.cpu_offload,
        splits_backward=recipe.layout.pipeline > 1
        and recipe.schedule.splits_backward(ranks=recipe.layout.pipeline, microbatches=recipe.microbatches),
        rests_in=formats.master,
        computes_in=formats.compute,
        kinds={
            "model": recipe.model.kind,
            "schedule": recipe.schedule.kind,
            "precision": recipe.precision.kind,
            "ac": recipe.ac.kind,
            "optimizer": recipe.optimizer.kind,
            "data": recipe.data.kind,
            "checkpoint": recipe.checkpoint.kind,
            "tracker": recipe.tracker.kind,
            "profiler": recipe.profiler.kind,
            "launch": recipe.launch.kind,
        },
    )


def _nearest_multiple(value: int, unit: int) -> int:
    return max(unit, round(value / unit) * unit)


def _closest(values: list[int], target: int) -> list[int]:
    return sorted(sorted(values, key=lambda value: abs(value - target))[:2])

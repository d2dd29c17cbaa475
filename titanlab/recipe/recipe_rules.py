"""The rules that involve several config groups: about layout, batch and schedule for a model, and the host's memory.

Each check raises a ConfigError for the first rule that is broken. The rules about memory are lower bounds: a recipe
that passes may still run out of memory, and its run then ends as `oom`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence

from titanlab.costs import (
    FSDP_AXES,
    STACK,
    STYLES,
    Layout,
    ModelAccount,
    Setting,
    account_for,
    compute_capability,
    cut_dim,
    divisors,
    parameter_style,
    with_frozen,
)
from titanlab.data import source
from titanlab.distributed import Host
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.recipe.recipe import Recipe, as_typed, needs_whole_logits, pieces_by_stage
from titanlab.records import check_name
from titanlab.system import counted
from titanlab.techniques.schedule.contract import PipelineSchedule

SEEDS = 2**63
# GPU kernels that cannot keep attention within documents, without (False) and with (True) context parallelism.
# FlexAttention and kernels with a mask can. Under context parallelism the numbers of rows and keys vary, and cuDNN
# would make a new plan for each pair of numbers.
_WITHOUT_DOCUMENTS = {False: ("flash", "flash3", "cudnn", "flash_attn"), True: ("cudnn",)}
# Least width of a head: FlexAttention refuses narrower heads (torch/_inductor/kernel/flex, torch 2.11 to 2.13).
_NARROWEST_FLEX = 16
# Ten times the largest clusters; plans with an entry for every process are still fast.
MOST_PROCESSES = 1_000_000


def check(recipe: Recipe) -> None:
    """Check a resolved recipe by all rules, except rules about the corpus's content, which has to be prepared first."""
    check_all_but_data(recipe)
    check_data(recipe)


def check_all_but_data(recipe: Recipe) -> None:
    check_name("name", recipe.name)
    check_name("sweep", recipe.sweep)
    if recipe.repeat < 0:
        raise ConfigError("repeat", recipe.repeat, "counts repetitions from 0", "try 0")
    if not 0 <= recipe.seed < SEEDS:
        raise ConfigError("seed", recipe.seed, "must lie in [0, 2⁶³)", "try 0")
    check_addressable(recipe)
    batch, ranks = recipe.training.global_batch, recipe.layout.data
    if batch % ranks:
        rule = f"must be a multiple of the {ranks} data-parallel processes"
        raise ConfigError("training.global_batch", batch, rule, f"try {max(ranks, round(batch / ranks) * ranks)}")
    if recipe.local_batch % recipe.microbatch:
        rule = f"must divide the {recipe.local_batch} sequences that one process has of a step"
        cure = f"try {_nearest(divisors(recipe.local_batch), recipe.microbatch)}"
        raise ConfigError("training.microbatch", recipe.microbatch, rule, cure)
    check_processes(recipe.layout.world)
    _layout_fits(recipe)
    check_training(recipe)
    _attention(recipe)
    values = setting(recipe)
    options = (recipe.model, recipe.schedule, recipe.precision, recipe.ac, recipe.compile, recipe.optimizer)
    for option in (*options, recipe.data, recipe.checkpoint, recipe.tracker, recipe.profiler, recipe.launch):
        option.check(values)
    # Check packages here: otherwise a missing one would be found only after the model has been built.
    recipe.tracker.check_installed()
    recipe.checkpoint.check_installed()


def check_data(recipe: Recipe) -> None:
    """Check a resolved recipe by the rules about data, except rules about the corpus's content (checked later)."""
    source.check(
        recipe.data,
        seq_len=recipe.training.seq_len,
        global_batch=recipe.training.global_batch,
        ranks=recipe.layout.data,
        vocab_size=recipe.model.vocab_size,
        validation_sequences=recipe.training.validation_sequences if recipe.training.validate_every else 0,
    )


def check_training(recipe: Recipe) -> None:
    training = recipe.training
    warmup = recipe.optimizer.schedule.warmup(training.steps)
    if warmup > training.steps:
        rule = f"is more than the {counted(training.steps, 'step')} of the run"
        raise ConfigError("optimizer.schedule.warmup_steps", warmup, rule, f"try {max(1, training.steps // 10)}")
    if training.on_nan == "rollback" and recipe.checkpoint.every == 0:
        rule = "goes back to a checkpoint, and checkpoint.every=0 saves none on the way"
        raise ConfigError("training.on_nan", "rollback", rule, "try checkpoint.every=100, or training.on_nan=skip")
    if training.check_every and recipe.cluster.accelerator == "cuda" and not training.deterministic:
        rule = "compares bits, and without training.deterministic=true kernels of a GPU may give others each time"
        raise ConfigError("training.check_every", training.check_every, rule, "set that too, or try 0")
    if recipe.loss_chunk and (reason := needs_whole_logits(recipe)) is not None:
        raise ConfigError("training.loss_chunk", training.loss_chunk, *reason)
    if training.freeze:
        _check_freeze(recipe)


def _check_freeze(recipe: Recipe) -> None:
    """Check that the patterns fit the model, and that every stage of a pipeline has a parameter to train."""
    key, patterns = "training.freeze", recipe.training.freeze
    trained = set(recipe.account.parameters) - named_parameters(key, patterns, recipe.account)
    for number, pieces in enumerate(pieces_by_stage(recipe) if recipe.layout.pipeline > 1 else []):
        begins = tuple(f"{piece}." for piece in pieces)
        if not any(name.startswith(begins) for name in trained):
            whole = " to ".join(dict.fromkeys((pieces[0], pieces[-1])))
            rule = f"leaves nothing to train in stage {number} of the pipeline: {whole}"
            cure = "freeze less, or cut the model elsewhere with parallelism.split, or try parallelism.pipeline=1"
            raise ConfigError(key, as_typed(patterns), rule, cure)


def named_parameters(key: str, patterns: Sequence[str], account: ModelAccount) -> frozenset[str]:
    """The parameters that the patterns name; the patterns are the value of the recipe's key `key`.

    Raises:
        ConfigError: a pattern names no parameter, or the patterns together name all parameters.
    """
    names = list(account.parameters)
    for pattern in patterns:
        if not with_frozen(account, (pattern,)).frozen:
            near = difflib.get_close_matches(pattern, {step for name in names for step in _paths(name)}, n=3)
            cure = f"try {', '.join(near)}" if near else f"give steps of a path such as {names[len(names) // 2]}"
            raise ConfigError(key, pattern, "names no parameter of the model", cure)
    found = with_frozen(account, patterns).frozen
    if len(found) == len(names):
        raise ConfigError(key, as_typed(patterns), "names all parameters of the model", "leave some of them out")
    return found


def _paths(name: str) -> Iterator[str]:
    """Examples of patterns that match a parameter: each step of its path, and the path from the first to each step."""
    steps = name.split(".")
    yield from steps
    yield from (".".join(steps[:count]) for count in range(2, len(steps) + 1))


def check_processes(world: int) -> None:
    if world > MOST_PROCESSES:
        rule = f"a layout has at most {MOST_PROCESSES:,} processes"
        raise ConfigError("world", world, rule, "give fewer, by smaller degrees of parallelism")


def _layout_fits(recipe: Recipe) -> None:
    layout, config, seq_len = recipe.layout, recipe.parallelism, recipe.training.seq_len
    account = recipe.model.account()
    check_context(layout, account, seq_len=seq_len, kernel=recipe.model.attention)
    check_expert(layout, config, account)
    account = account_for(account, layout)
    check_tensor(layout, config, account, seq_len=seq_len, microbatch=recipe.microbatch)
    _check_fast_collectives(recipe)
    if config.symmetric_memory:
        # Imported here: it imports torch, which no rule about layouts needs.
        from titanlab.parallelism import symmetric_memory_setter

        symmetric_memory_setter()
    check_pipeline(layout, config, account, recipe.schedule, microbatches=recipe.microbatches)
    if layout.pipeline > 1:
        pieces_by_stage(recipe)
    if config.reduce_gradients == "each" and splits_backward(recipe):
        rule = f"needs gradients block by block, and {recipe.schedule.kind} computes those of a stage at once"
        raise ConfigError("parallelism.reduce_gradients", "each", rule, "try last, or schedule=1f1b")
    is_fsdp = layout.data_parallelism(mixed=recipe.precision.formats().mixed) == "fsdp2"
    for name, default in (("gathered_blocks", 1), ("prefetch", 0)):
        if getattr(config, name) != default and not is_fsdp:
            rule = "is about the gathers of FSDP2, and nothing is sharded"
            raise ConfigError(f"parallelism.{name}", getattr(config, name), rule, "try parallelism.shard=2")
    if config.gathered_blocks > 1 and not config.frees_after_forward:
        rule = "keeps some blocks gathered, and here all stay gathered until the backward"
        cure = "try 1, or parallelism.reshard_after_forward=always"
        raise ConfigError("parallelism.gathered_blocks", config.gathered_blocks, rule, cure)
    if config.cpu_offload and layout.fsdp == 1:
        rule = "moves sharded parameters, and nothing is sharded"
        raise ConfigError("parallelism.cpu_offload", True, rule, "try parallelism.shard=2")


def _attention(recipe: Recipe) -> None:
    """Check that the hardware and the document mask allow the attention kernel."""
    backend, on_gpu = recipe.model.attention, recipe.cluster.accelerator == "cuda"
    if not on_gpu and backend in ("cudnn", "efficient", "flash3", "flash_attn"):
        raise ConfigError("model.attention", backend, "needs a GPU", "try auto, flash or math")
    narrow = ("flash", "cudnn", "flash3", "flash_attn")
    if on_gpu and backend in narrow and recipe.precision.formats().compute == "float32":
        rule = "computes in 16 bits only on a GPU"
        raise ConfigError("model.attention", backend, rule, "try precision=bf16, or auto")
    if backend == "flash_attn" and importlib.util.find_spec(backend) is None:
        rule = "is a kernel of the package flash-attn, which is not installed"
        raise ConfigError("model.attention", backend, rule, "pip install flash-attn, or try auto")
    if backend == "flash3":
        # Imported here: it imports torch, which no other rule needs.
        from titanlab.techniques.model.attention import flash3_missing

        reason = flash3_missing(compute_capability(str(recipe.cluster.device)))
        if reason is not None:
            raise ConfigError("model.attention", backend, *reason)
    if recipe.data.document_mask and not recipe.model.masks_documents:
        rule = f"model={recipe.model.kind} does not mask documents"
        raise ConfigError("data.document_mask", True, rule, "try false, or see docs/models-of-your-own.md")
    if not recipe.data.document_mask or not on_gpu:
        return
    if backend in _WITHOUT_DOCUMENTS[recipe.layout.context > 1]:
        rule = f"cannot mask documents with context={recipe.layout.context}, and data.document_mask is on"
        raise ConfigError("model.attention", backend, rule, "try auto")
    width = recipe.model.account().head_dim
    if backend == "auto" and recipe.layout.context == 1 and width < _NARROWEST_FLEX:
        rule = (
            f"with data.document_mask is FlexAttention, which on a GPU needs a head_dim of at least {_NARROWEST_FLEX}"
        )
        raise ConfigError("model.attention", backend, f"{rule}; this model has {width}", "try efficient")


def splits_backward(recipe: Recipe) -> bool:
    """Whether the schedule of a resolved recipe's pipeline computes gradients of weights after those of inputs."""
    ranks = recipe.layout.pipeline
    splits: bool = ranks > 1 and recipe.schedule.splits_backward(ranks=ranks, microbatches=recipe.microbatches)
    return splits


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
        splits_backward=splits_backward(recipe),
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


# Most pairs of a stage and a microbatch in a step: a schedule lists actions for each pair, so more would take too long.
MOST_ACTIONS = 1_000_000


def check_tensor(layout: Layout, config: Parallelism, account: ModelAccount, *, seq_len: int, microbatch: int) -> None:
    degree = layout.tensor
    if degree == 1:
        return
    key = "parallelism.tensor"
    if not account.tensor_plan:
        raise ConfigError(key, degree, "the model has no plan of how to cut its layers", "try parallelism.tensor=1")
    cuts = _cuts(account, degree)
    usable = [n for n in divisors(account.kv_heads) if not _broken_rule(account, cuts, n)]
    rule = _broken_rule(account, cuts, degree)
    if rule:
        raise ConfigError(key, degree, rule, _try(key, usable, degree))
    _check_fsdp_cuts(layout, cuts)
    local = microbatch * seq_len // layout.context
    if config.sequence_parallel and local % degree:
        rule = f"with sequence_parallel, must divide the {local} tokens that a process has of a microbatch"
        cure = _try(key, [n for n in usable if local % n == 0], degree)
        raise ConfigError(key, degree, rule, f"{cure}, or parallelism.sequence_parallel=false")


_Cut = tuple[str, tuple[int, ...], str]  # name, shape and style of a parameter that the tensor plan splits


def _cuts(account: ModelAccount, degree: int) -> list[_Cut]:
    """One parameter of each shape and style, among the parameters that the tensor plan splits."""
    cuts: dict[tuple[tuple[int, ...], str], _Cut] = {}
    for name, shape in account.parameters.items():
        style = parameter_style(account, name)
        known = STYLES.get(style)
        if style == "" or (known is not None and not known.has_parameters):
            rule = f"the model's plan says nothing about {name}"
            cure = "try parallelism.tensor=1, or name it in the model's tensor_plan"
            raise ConfigError("parallelism.tensor", degree, rule, cure)
        if known is not None and known.cut_dim is not None and style != STACK:
            cuts.setdefault((shape, style), (name, shape, style))
    return list(cuts.values())


def _broken_rule(account: ModelAccount, cuts: Iterable[_Cut], degree: int) -> str:
    """The rule that a tensor-parallel degree breaks; empty: it breaks no rule."""
    for heads, noun in ((account.heads, "attention heads"), (account.kv_heads, "key/value heads")):
        if heads % degree:
            return f"must divide {heads} {noun}"
    for name, shape, style in cuts:
        dim, allows_uneven = cut_dim(style, len(shape)), STYLES[style].allows_uneven
        if dim is not None and not allows_uneven and shape[dim] % degree:
            noun = ("rows", "columns")[dim - STYLES[style].is_stack]
            return f"must divide the {shape[dim]} {noun} of {name}"
        # The first ranks get equal parts, rounded up. If there are few rows, the last rank could get no row.
        if allows_uneven and -(-shape[0] // degree) * (degree - 1) >= shape[0]:
            return f"leaves a process without a row of {name}, which has {shape[0]}"
    return ""


def _check_fsdp_cuts(layout: Layout, cuts: Sequence[_Cut]) -> None:
    """Check that FSDP2 can shard what tensor parallelism cuts by rows: rows into equal parts, or else columns."""

    def uneven(fsdp: int) -> Iterator[_Cut]:
        for cut in cuts:
            _, shape, style = cut
            rows, columns = shape[0], math.prod(shape[1:2])
            if STYLES[style].cut_dim == 0 and rows % (layout.tensor * fsdp) and columns % fsdp:
                yield cut

    if layout.fsdp == 1:
        return
    axis = next(name for name in FSDP_AXES if getattr(layout, name) > 1)
    key, degree = f"parallelism.{axis}", getattr(layout, axis)
    for name, shape, _ in uneven(layout.fsdp):
        by_columns = f", nor its {shape[1]} columns into {layout.fsdp}" if len(shape) > 1 else ""
        rule = (
            f"with tensor={layout.tensor}, cannot cut the {shape[0]} rows of {name} "
            f"into {layout.tensor * layout.fsdp} equal parts{by_columns}"
        )
        # FSDP2's number of parts must divide the rows or the columns of this parameter.
        parts = {*divisors(shape[0]), *divisors(math.prod(shape[1:2]))}
        degrees = {n * degree // layout.fsdp for n in parts if n * degree % layout.fsdp == 0}
        usable = [n for n in degrees if n < 2 * degree and not any(uneven(layout.fsdp // degree * n))]
        cure = f"{_try(key, usable, degree)}, or parallelism.tensor=1" if usable else "try parallelism.tensor=1"
        raise ConfigError(key, degree, rule, cure)


def check_expert(layout: Layout, config: Parallelism, account: ModelAccount) -> None:
    """Check that expert parallelism can divide the experts among the processes of shard, context and tensor."""
    degree, key = layout.expert, "parallelism.expert"
    if degree < 1:
        rule = "must be at least 1: the world is the product of the other degrees, so this one cannot follow from it"
        raise ConfigError(key, degree, rule, "try 1")
    if degree == 1:
        return
    if account.experts is None:
        raise ConfigError(key, degree, "the model has no experts", "try parallelism.expert=1")
    ranks, count = layout.fsdp * layout.tensor, account.experts.count
    usable = [n for n in divisors(ranks) if count % n == 0]
    if ranks % degree:
        rule = f"must divide the {ranks} processes of shard · context · tensor"
        raise ConfigError(key, degree, rule, _try(key, usable, degree))
    if count % degree:
        raise ConfigError(key, degree, f"must divide the {count} experts", _try(key, usable, degree))
    if layout.tensor > 1 and not config.sequence_parallel:
        rule = "needs tokens that are divided among the processes of the tensor axis"
        cure = "try parallelism.sequence_parallel=true"
        raise ConfigError(key, degree, f"{rule}, and sequence_parallel=false", cure)
    for name, shape in account.parameters.items():
        if account.is_of_experts(name) and count % (degree * layout.expert_shard) and shape[1] % layout.expert_shard:
            rule = (
                f"leaves {count // degree} experts to {layout.expert_shard} shards of FSDP2, "
                f"which do not divide them nor the {shape[1]} rows of {name}"
            )
            raise ConfigError(key, degree, rule, _try(key, usable, ranks))


def check_context(layout: Layout, account: ModelAccount, *, seq_len: int, kernel: str) -> None:
    """Check that context parallelism supports the attention kernel, and gives each process two chunks of a sequence."""
    chunks = 2 * layout.context
    if layout.context == 1:
        return
    if not account.attention:
        rule = "the model does not say where its attention is"
        raise ConfigError("parallelism.context", layout.context, rule, "try parallelism.context=1")
    if seq_len % chunks:
        rule = f"must be a multiple of {chunks}: two chunks for each of {layout.context} context-parallel processes"
        cure = f"try {max(1, round(seq_len / chunks)) * chunks}"
        raise ConfigError("training.seq_len", seq_len, rule, cure)
    if kernel == "math":
        rule = f"needs all scores at once, and context={layout.context} computes them in parts"
        raise ConfigError("model.attention", kernel, rule, "try auto")
    if kernel == "flash_attn":
        rule = f"is not a kernel of torch, which context={layout.context} needs"
        raise ConfigError("model.attention", kernel, rule, "try auto or flash")


def check_pipeline(
    layout: Layout, config: Parallelism, account: ModelAccount, schedule: PipelineSchedule, *, microbatches: int
) -> None:
    degree = layout.pipeline
    if degree == 1:
        if config.split is not None:
            rule = "says where a pipeline is cut, and parallelism.pipeline=1"
            raise ConfigError("parallelism.split", as_typed(config.split), rule, "try null")
        return
    key = "parallelism.pipeline"
    if not account.pieces:
        raise ConfigError(key, degree, "the model does not say where it may be cut", "try parallelism.pipeline=1")
    if account.tied:
        rule = "the head is the embedding's table, which first and last stage would both have to own"
        raise ConfigError(key, degree, rule, "try parallelism.pipeline=1, or model.tied_embeddings=false")
    stages = schedule.stage_count(ranks=degree)
    if stages <= account.layers:
        # The schedule's own check takes long for many ranks, so the limit on stages is checked first.
        schedule.check_pipeline(ranks=degree, microbatches=microbatches)
        stages = len(schedule.placement(ranks=degree))
    if stages > account.layers:
        rule = f"{schedule.kind} makes {stages} stages of it, more than the {account.layers} blocks of the model"
        fits = list(range(1, min(degree - 1, account.layers // (stages // degree)) + 1))
        other = "a schedule with fewer stages a rank" if stages > degree else "a model of more blocks"
        raise ConfigError(key, degree, rule, f"{_try(key, fits or [1], degree)}, or {other}")
    if stages * microbatches > MOST_ACTIONS:
        rule = f"makes {microbatches:,} microbatches of a step, in {stages} stages: too many for a schedule"
        cure = "give a smaller training.global_batch, or a larger training.microbatch"
        raise ConfigError(key, degree, rule, cure)


def _check_fast_collectives(recipe: Recipe) -> None:
    """Check that hardware, layout and compiler support AsyncTP and symmetric memory, if the recipe chooses them."""
    layout, config, compiler = recipe.layout, recipe.parallelism, recipe.compile
    on_cpu = recipe.cluster.accelerator != "cuda"
    async_tensor = (
        (layout.tensor == 1, "interleaves the collectives of tensor parallelism, and tensor=1", "try false"),
        (on_cpu, "needs symmetric memory between GPUs, and this runs on a CPU", "try false"),
        (
            not config.sequence_parallel,
            "interleaves gathers and scatters of sequences, and sequence_parallel=false has none",
            "try parallelism.sequence_parallel=true",
        ),
        (not compiler.blocks, "is done by inductor, and the blocks are not compiled", "try compile=block"),
        (
            compiler.backend != "inductor",
            f"is done by inductor, and {compiler.backend} compiles the blocks",
            "try compile.backend=inductor",
        ),
    )
    cure = "try false, or parallelism.cpu_offload=false"
    rule = "uses NCCL's symmetric memory, AsyncTP needs CUDA's, and torch allows only one of them in a process"
    symmetric_memory = (
        (layout.fsdp == 1, "is memory in which FSDP2 gathers, and nothing is sharded", "try false"),
        (on_cpu, "is memory between GPUs, and this runs on a CPU", "try false"),
        (config.cpu_offload, "has not been tried with parameters in host memory", cure),
        (config.async_tensor, rule, "try false, or parallelism.async_tensor=false"),
    )
    for name, rows in {"async_tensor": async_tensor, "symmetric_memory": symmetric_memory}.items():
        for is_broken, rule, cure in rows:
            if getattr(config, name) and is_broken:
                raise ConfigError(f"parallelism.{name}", True, rule, cure)


def _try(key: str, usable: list[int], degree: int) -> str:
    return f"try {key}={_nearest(usable, degree)}"


def _nearest(usable: Iterable[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(usable, key=lambda n: (abs(n - wanted), n))[:2])))


# Memory of a process without tensors: a Python that has imported torch, without the pages that processes share.
PROCESS_BYTES = 64 * 2**20
_ADDRESSABLE = 2**63  # bytes; sizes are signed 64-bit integers


def check_addressable(recipe: Recipe) -> None:
    parameters = recipe.model.account().parameter_count
    if parameters * recipe.precision.formats().master_bytes >= _ADDRESSABLE:
        # Name the largest whole number among the model's fields: that is the likely mistake.
        sizes = {field.name: getattr(recipe.model, field.name) for field in dataclasses.fields(recipe.model)}
        name = max((name for name in sizes if type(sizes[name]) is int), key=lambda name: sizes[name], default="kind")
        rule = f"makes a model of {parameters:.1e} parameters, more bytes than there are addresses"
        raise ConfigError(f"model.{name}", sizes.get(name), rule, "give a smaller number")


def check_host_memory(recipe: Recipe, host: Host, *, processes: int) -> None:
    """Check that this host has at least the memory that training on its CPU needs; does not check GPU memory.

    The needed bytes are those of processes, parameters, gradients, and one microbatch's tokens and residual stream.

    Args:
        recipe: a resolved recipe.
        processes: how many processes of the run start on this host.
    """
    if host.memory_bytes is None or recipe.cluster.accelerator != "cpu":
        return
    layout, local_fraction = recipe.layout, processes / recipe.layout.world
    process_bytes = processes * PROCESS_BYTES
    parameters = recipe.model.account().parameter_count
    # The processes of each replica together have every parameter and its gradient once.
    model_bytes = int(2 * recipe.precision.formats().master_bytes * parameters * layout.replicate * local_fraction)
    compute_bytes = recipe.precision.formats().compute_bytes
    tokens = recipe.microbatch * recipe.training.seq_len
    width = recipe.model.account().dim
    token_bytes = int(tokens * layout.data * (8 + width * compute_bytes) * local_fraction)
    has = f"and this machine has {_gib(host.memory_bytes)}"
    elsewhere = "a machine with more memory, such as with launch=slurm"
    if process_bytes > host.memory_bytes:
        rule = f"processes take at least {_gib(process_bytes)}, {has}"
        raise ConfigError("world", processes, rule, f"try world={max(1, host.count)}, or take {elsewhere}")
    if process_bytes + model_bytes > host.memory_bytes:
        rule = f"{parameters:,} parameters and their gradients take at least {_gib(model_bytes)} here, {has}"
        raise ConfigError("model", recipe.model.kind, rule, f"take a smaller model, or {elsewhere}")
    if process_bytes + model_bytes + token_bytes > host.memory_bytes:
        training = recipe.training
        key = "seq_len" if recipe.microbatch < training.seq_len else "global_batch"
        if key == "global_batch" and training.microbatch is not None:
            key = "microbatch"
        rule = f"one microbatch is {tokens:,} tokens, which take at least {_gib(token_bytes)} here, {has}"
        cure = f"give a smaller number, or training.microbatch=1, or take {elsewhere}"
        raise ConfigError(f"training.{key}", getattr(training, key), rule, cure)


def _gib(count: int) -> str:
    """Bytes as text in GiB; in scientific notation from a million GiB on."""
    gib = count / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e6 else f"{gib:.1e} GiB"

"""The rules of a layout for model, sequence, batch and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from titanlab.costs.account import STYLES, ModelAccount, cut_dim, parameter_style
from titanlab.costs.layout import FSDP_AXES, Layout, divisors
from titanlab.costs.shard_account import STACK
from titanlab.errors import ConfigError
from titanlab.parallelism.schema import Parallelism
from titanlab.recipe.stage_pieces import as_typed
from titanlab.schedule.contract import PipelineSchedule

# Passes of one microbatch through one stage, in a step. The schedule is a list of all of them, made before the step.
MOST_ACTIONS = 1_000_000


def check_tensor(layout: Layout, config: Parallelism, account: ModelAccount, *, seq_len: int, microbatch: int) -> None:
    """Check that tensor parallelism can split heads, matrices and the sequence.

    Raises:
        ConfigError: it cannot.
    """
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


class _CutParameter(NamedTuple):
    """A parameter that the tensor plan splits; it represents all parameters of its shape and style."""

    name: str
    shape: tuple[int, ...]
    style: str


def _cuts(account: ModelAccount, degree: int) -> list[_CutParameter]:
    cuts: dict[tuple[tuple[int, ...], str], _CutParameter] = {}
    for name, shape in account.parameters.items():
        style = parameter_style(account, name)
        known = STYLES.get(style)
        if style == "" or (known is not None and not known.has_parameters):
            rule = f"the model's plan says nothing about {name}"
            raise ConfigError(
                "parallelism.tensor", degree, rule, "try parallelism.tensor=1, or name it in the model's tensor_plan"
            )
        if known is not None and known.cut_dim is not None and style != STACK:
            cuts.setdefault((shape, style), _CutParameter(name, shape, style))
    return list(cuts.values())


def _broken_rule(account: ModelAccount, cuts: Iterable[_CutParameter], degree: int) -> str:
    """The rule that a tensor-parallel degree breaks; empty: none."""
    for heads, noun in ((account.heads, "attention heads"), (account.kv_heads, "key/value heads")):
        if heads % degree:
            return f"must divide {heads} {noun}"
    for name, shape, style in cuts:
        dim, allows_uneven = cut_dim(style, len(shape)), STYLES[style].allows_uneven
        if dim is not None and not allows_uneven and shape[dim] % degree:
            noun = ("rows", "columns")[dim - STYLES[style].is_stack]
            return f"must divide the {shape[dim]} {noun} of {name}"
        # The first ranks get equal parts, rounded up. If there are few rows, none remain for the last rank.
        if allows_uneven and -(-shape[0] // degree) * (degree - 1) >= shape[0]:
            return f"leaves a process without a row of {name}, which has {shape[0]}"
    return ""


def _check_fsdp_cuts(layout: Layout, cuts: Sequence[_CutParameter]) -> None:
    """Check that FSDP2 can split the parameters that tensor parallelism splits by rows: rows evenly, else columns."""

    def uneven(fsdp: int) -> Iterator[_CutParameter]:
        for cut in cuts:
            rows, columns = cut.shape[0], math.prod(cut.shape[1:2])
            if STYLES[cut.style].cut_dim == 0 and rows % (layout.tensor * fsdp) and columns % fsdp:
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
        usable = [n for n in range(1, 2 * degree) if not any(uneven(layout.fsdp // degree * n))]
        cure = f"{_try(key, usable, degree)}, or parallelism.tensor=1" if usable else "try parallelism.tensor=1"
        raise ConfigError(key, degree, rule, cure)


def check_expert(layout: Layout, config: Parallelism, account: ModelAccount) -> None:
    """Check that expert parallelism can divide the experts among the processes of shard, context and tensor.

    Raises:
        ConfigError: it cannot.
    """
    degree, key = layout.expert, "parallelism.expert"
    if degree < 1:
        rule = "a degree is at least 1, and that of experts does not follow from the world: it multiplies nothing"
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
    """Check that context parallelism can split the sequence into two chunks for each process.

    Args:
        kernel: the recipe's attention kernel.

    Raises:
        ConfigError: it cannot, or it does not support the kernel.
    """
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
        rule = f"writes out all scores, and context={layout.context} puts attention together of parts that are not"
        raise ConfigError("model.attention", kernel, rule, "try auto")
    if kernel == "flash_attn":
        rule = f"is no kernel of torch's, of which context={layout.context} puts attention together"
        raise ConfigError("model.attention", kernel, rule, "try auto or flash")


def check_pipeline(
    layout: Layout, config: Parallelism, account: ModelAccount, schedule: PipelineSchedule, *, microbatches: int
) -> None:
    """Check that the model has enough blocks for the stages, and that the schedule supports them.

    Raises:
        ConfigError: the model or the schedule does not fit the pipeline.
    """
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
        # The schedule's own check takes long for a large number of ranks, so the simple limit comes first.
        schedule.check_pipeline(ranks=degree, microbatches=microbatches)
        stages = len(schedule.placement(ranks=degree))
    if stages > account.layers:
        rule = f"{schedule.kind} makes {stages} stages of it, more than the {account.layers} blocks of the model"
        fits = list(range(1, min(degree - 1, account.layers // (stages // degree)) + 1))
        other = "a schedule with fewer stages a rank" if stages > degree else "a model of more blocks"
        raise ConfigError(key, degree, rule, f"{_try(key, fits or [1], degree)}, or {other}")
    if stages * microbatches > MOST_ACTIONS:
        rule = f"makes {microbatches:,} microbatches of a step, in {stages} stages: more than a schedule is made for"
        cure = "give a smaller training.global_batch, or a larger training.microbatch"
        raise ConfigError(key, degree, rule, cure)


def check_async_tensor(layout: Layout, config: Parallelism, *, accelerator: str, compiled: str | bool) -> None:
    """Check that hardware and compiler support AsyncTP.

    Args:
        compiled: the backend that compiles blocks; False: blocks are not compiled.

    Raises:
        ConfigError: they do not.
    """
    if not config.async_tensor:
        return
    key = "parallelism.async_tensor"
    if layout.tensor == 1:
        raise ConfigError(key, True, "interleaves the collectives of tensor parallelism, and tensor=1", "try false")
    if accelerator != "cuda":
        raise ConfigError(key, True, "needs symmetric memory between GPUs, and this runs on a CPU", "try false")
    if not config.sequence_parallel:
        rule = "interleaves gathers and scatters of sequences, and sequence_parallel=false has none"
        raise ConfigError(key, True, rule, "try parallelism.sequence_parallel=true")
    if not compiled:
        raise ConfigError(key, True, "is done by inductor, and the blocks are not compiled", "try compile=block")
    if compiled != "inductor":
        rule = f"is done by inductor, and {compiled} compiles the blocks"
        raise ConfigError(key, True, rule, "try compile.backend=inductor")


def check_symmetric_memory(layout: Layout, config: Parallelism, *, accelerator: str) -> None:
    """Check that FSDP2 can use symmetric memory.

    Raises:
        ConfigError: it cannot.
    """
    if not config.symmetric_memory:
        return
    key = "parallelism.symmetric_memory"
    if layout.fsdp == 1:
        raise ConfigError(key, True, "is memory in which FSDP2 gathers, and nothing is sharded", "try false")
    if accelerator != "cuda":
        raise ConfigError(key, True, "is memory between GPUs, and this runs on a CPU", "try false")
    if config.cpu_offload:
        rule = "has not been tried with parameters in host memory"
        raise ConfigError(key, True, rule, "try false, or parallelism.cpu_offload=false")
    if config.async_tensor:
        rule = "is memory of NCCL, AsyncTP needs that of CUDA, and torch has one of both in a process"
        raise ConfigError(key, True, rule, "try false, or parallelism.async_tensor=false")


def _try(key: str, usable: list[int], degree: int) -> str:
    """The advice to try the two usable degrees that are nearest to the given degree."""
    nearest = sorted(sorted(usable, key=lambda n: (abs(n - degree), n))[:2])
    return f"try {key}=" + " or ".join(str(n) for n in nearest)

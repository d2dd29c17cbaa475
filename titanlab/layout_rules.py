"""What a layout asks of model, sequence, batch and schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from titanlab.account import ModelAccount
from titanlab.errors import ConfigError
from titanlab.layout import Layout
from titanlab.options import implementation
from titanlab.parallelism.schema import Parallelism

# Styles of a tensor plan by the dim of a parameter that they cut; the others keep parameters whole or have none.
CUTS = {"colwise": 0, "rowwise": 1}
UNEVEN = ("embedding", "head")


def check_tensor(layout: Layout, config: Parallelism, account: ModelAccount, *, seq_len: int, microbatch: int) -> None:
    """Tensor parallelism: heads, matrices and sequence can be cut.

    Raises:
        ConfigError: they cannot.
    """
    degree = layout.tensor
    if degree == 1:
        return
    key = "parallelism.tensor"
    if not account.tensor_plan:
        raise ConfigError(key, degree, "the model has no plan of how to cut its layers", "try parallelism.tensor=1")
    for heads, what in ((account.heads, "attention heads"), (account.kv_heads, "key/value heads")):
        if heads % degree:
            usable = [n for n in range(2, account.kv_heads + 1) if not account.heads % n and not account.kv_heads % n]
            raise ConfigError(key, degree, f"must divide {heads} {what}", _try(key, [1, *usable], degree))
    for name, shape, style in _styled(account):
        if style in CUTS and len(shape) > CUTS[style] and shape[CUTS[style]] % degree:
            rule = f"must divide the {shape[CUTS[style]]} that {name} is wide"
            raise ConfigError(key, degree, rule, _try(key, _divisors(shape[CUTS[style]]), degree))
        # The first ranks have equal parts, rounded up: with few rows nothing is left for the last.
        if style in UNEVEN and -(-shape[0] // degree) * (degree - 1) >= shape[0]:
            raise ConfigError(key, degree, f"leaves a process without a row of {name}, which has {shape[0]}", "try 2")
        _check_fsdp_cut(layout, name, shape, style)
    local = microbatch * seq_len // layout.context
    if config.sequence_parallel and local % degree:
        rule = f"with sequence_parallel, must divide the {local} tokens that a process has of a microbatch"
        raise ConfigError(key, degree, rule, f"{_try(key, _divisors(local), degree)}, or sequence_parallel=false")


def _check_fsdp_cut(layout: Layout, name: str, shape: tuple[int, ...], style: str) -> None:
    """What tensor parallelism cuts by rows FSDP2 cuts by rows again, in equal parts, or by columns."""
    if style == "rowwise" or layout.fsdp == 1 or shape[0] % (layout.tensor * layout.fsdp) == 0:
        return
    if len(shape) < 2 or shape[1] % layout.fsdp:
        rule = f"{name} {list(shape)} cannot be cut {layout.tensor} times by rows and {layout.fsdp} times again evenly"
        raise ConfigError(
            "parallelism.shard", layout.shard, rule, "try another parallelism.shard or parallelism.tensor"
        )


def _styled(account: ModelAccount) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Parameters that a style of the plan cuts, with shape and style."""
    for name, shape in account.parameters.items():
        module = name.rpartition(".")[0]
        styles = [style for pattern, style in account.tensor_plan.items() if _matches(module, pattern)]
        if not styles:
            rule = f"the model's plan says nothing about {name}"
            raise ConfigError("parallelism.tensor", "…", rule, "try parallelism.tensor=1, or name it in tensor_plan")
        if styles[-1] != "norm":
            yield name, shape, styles[-1]


def _matches(module: str, pattern: str) -> bool:
    return module.count(".") == pattern.count(".") and fnmatch.fnmatchcase(module, pattern)


def check_context(layout: Layout, account: ModelAccount, *, seq_len: int) -> None:
    """Context parallelism: the sequence can be cut in two chunks for every process.

    Raises:
        ConfigError: it cannot.
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


def check_pipeline(layout: Layout, account: ModelAccount, schedule: Any, *, microbatches: int) -> None:
    """Pipeline: enough pieces for every stage, and a schedule that fits.

    Raises:
        ConfigError: they do not.
    """
    degree = layout.pipeline
    if degree == 1:
        return
    key = "parallelism.pipeline"
    if not account.pieces:
        raise ConfigError(key, degree, "the model does not say where it may be cut", "try parallelism.pipeline=1")
    if account.tied:
        rule = "the head is the embedding's table, which first and last stage would both have to own"
        raise ConfigError(key, degree, rule, "try parallelism.pipeline=1, or model.tied_embeddings=false")
    part = implementation(schedule)
    part.check(schedule, ranks=degree, microbatches=microbatches)
    stages = len(part.placement(schedule, ranks=degree))
    if stages > account.layers:
        rule = f"{schedule.kind} makes {stages} stages of it, more than the {account.layers} blocks of the model"
        fits = [n for n in range(1, degree) if stages // degree * n <= account.layers]
        raise ConfigError(key, degree, rule, _try(key, fits or [1], degree) + ", or another schedule")


def check_async_tensor(layout: Layout, config: Parallelism, *, accelerator: str, compiled: str | bool) -> None:
    """AsyncTP: hardware and compiler can do it.

    Args:
        compiled: the backend that compiles blocks; False: none does.

    Raises:
        ConfigError: it cannot.
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
    if compiled != "inductor":
        rule = "is done by inductor, which does not compile the blocks here"
        raise ConfigError(key, True, rule, "try compile=block compile.backend=inductor")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _try(key: str, usable: list[int], asked: int) -> str:
    """The usable degrees next to the one that was asked for."""
    nearest = sorted(sorted(usable, key=lambda n: (abs(n - asked), n))[:2])
    return f"try {key}=" + " or ".join(str(n) for n in nearest)

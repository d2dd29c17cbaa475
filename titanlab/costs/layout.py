"""`Layout`: the number of processes on each axis of parallelism; and the divisors of a number, for degrees."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from titanlab.errors import ConfigError

# The axes of parallelism, outermost first: neighbouring ranks, which have the fastest links, differ in the last axis.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
# Axes whose ranks read different sequences. Context ranks share a sequence; their gradients are summed as if they had
# different sequences.
DATA_AXES = ("replicate", "shard")
# Axes over whose ranks FSDP2 shards parameters, gradients and optimizer state. They are adjacent axes. If both have
# degrees above 1, they are one dimension of the mesh.
FSDP_AXES = ("shard", "context")
# Short names of axes, for labels and names of runs. In labels the pipeline comes last, as in the literature.
SHORT = {"replicate": "dp_r", "shard": "dp_s", "context": "cp", "tensor": "tp", "pipeline": "pp"}

# What sums the gradients of data-parallel ranks.
DataParallelism = Literal["ddp", "fsdp2", "none"]
FOLD = "·"  # between the names of axes that share one dimension of the mesh


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degree of every axis. The product of all degrees but `expert` is the world size.

    Attributes:
        pipeline: processes that each have a part of the layers.
        replicate: copies of the whole (possibly sharded) model that train on different sequences.
        shard: processes over which parameters, gradients and optimizer state are sharded.
        context: processes that each have a part of every sequence.
        tensor: processes that each have a part of every layer.
        expert: processes that each have a part of every block's experts. They are neighbours on the axes shard, context
            and tensor: `expert` divides the product of these three degrees, and adds no processes.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def expert_shard(self) -> int:
        """Number of processes over which FSDP2 shards each of the `expert` parts of the experts."""
        return self.fsdp * self.tensor // self.expert

    # The next three are cached: a search for layouts reads them some ten thousand times.

    @functools.cached_property
    def world(self) -> int:
        return math.prod(self.degrees().values())

    @functools.cached_property
    def data(self) -> int:
        return math.prod(getattr(self, name) for name in DATA_AXES)

    @functools.cached_property
    def fsdp(self) -> int:
        return math.prod(getattr(self, name) for name in FSDP_AXES)

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """The axes over which FSDP2 shards: `shard`, and `context` if its degree is above 1."""
        return (FSDP_AXES[0], *(name for name in FSDP_AXES[1:] if getattr(self, name) > 1))

    @property
    def fsdp_name(self) -> str:
        """Name of the mesh dimension over which FSDP2 shards: `shard` or `shard·context`."""
        return FOLD.join(self.fsdp_axes)

    @property
    def label(self) -> str:
        """Short form for tables: `dp_r2·dp_s4·tp2`, or `single`."""
        parts = [f"{short}{getattr(self, axis)}" for axis, short in SHORT.items() if getattr(self, axis) > 1]
        if self.expert > 1:
            parts.append(f"ep{self.expert}")
        return "·".join(parts) or "single"

    def data_parallelism(self, *, mixed: bool) -> DataParallelism:
        """What sums the gradients of ranks with different tokens: DDP, FSDP2 or nothing.

        Args:
            mixed: parameters are cast before they compute, or gradients before they are summed. FSDP2 does these casts.
                One process uses FSDP2 too, so that it computes the same numbers as several processes.
        """
        if mixed:
            return "fsdp2"
        # DDP only without other axes: it cannot sum gradients of DTensors, nor of schedules that split the backward.
        if self.replicate == self.world > 1:
            return "ddp"
        shards_experts = self.expert > 1 and self.expert_shard > 1
        return "fsdp2" if self.replicate * self.fsdp > 1 or shards_experts else "none"

    def degrees(self) -> dict[str, int]:
        """Degree by axis, in mesh order (outermost first)."""
        return {axis: getattr(self, axis) for axis in AXES}


def hidden_shape(
    layout: Layout, *, microbatch: int, seq_len: int, dim: int, sequence_parallel: bool
) -> tuple[int, int, int]:
    """Shape of the tensor that pipeline stages exchange per microbatch, on one rank.

    [microbatch, seq of this rank, dim], or under sequence parallelism [1, this rank's tokens of a microbatch, dim].
    """
    seq_len //= layout.context
    if layout.tensor > 1 and sequence_parallel:
        return (1, microbatch * seq_len // layout.tensor, dim)
    return (microbatch, seq_len, dim)


def resolve_layout(degrees: dict[str, int], world: int | None) -> Layout:
    """The layout, with a degree of -1 computed from the world size.

    Raises:
        ConfigError: a degree is neither positive nor -1, two are -1, one is -1 without a world size, or
            the product is not the world size.
    """
    for axis, degree in degrees.items():
        if degree < 1 and degree != -1:
            raise ConfigError(f"parallelism.{axis}", degree, "a degree is at least 1, or -1 for the rest", "try 1")
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    product = math.prod(degree for degree in degrees.values() if degree != -1)
    if not open_axes:
        if world is not None and product != world:
            rule = f"the degrees make {product} ({_product(degrees)})"
            raise ConfigError("world", world, rule, f"try world={product}, or a degree of -1 for the rest")
        return Layout(**degrees)
    axis = open_axes[0]
    key = f"parallelism.{axis}"
    if len(open_axes) > 1:
        other = open_axes[1]
        rule = f"only one degree may be -1, and parallelism.{other} is too"
        raise ConfigError(key, -1, rule, f"try parallelism.{other}=1")
    if world is None:
        rule = "stands for the rest of the world, whose size is not given"
        raise ConfigError(key, -1, rule, f"try world=2, or {key}=2")
    if world % product:
        rule = f"the other degrees make {product}, which does not divide it"
        raise ConfigError("world", world, rule, f"try world={product * max(1, world // product)}")
    return Layout(**{**degrees, axis: world // product})


def _product(degrees: dict[str, int]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all are 1"


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

"""A layout: how many processes each axis of parallelism has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlab.errors import ConfigError

# Outermost first: neighbours in rank order, which share the fastest links, differ in the last axis.
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
SHORT = {"replicate": "dp_r", "shard": "dp_s", "context": "cp", "tensor": "tp", "pipeline": "pp"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of every axis; their product is the world size.

    Attributes:
        pipeline: processes that each hold a part of the layers.
        replicate: copies of the whole (possibly sharded) model that train on different sequences.
        shard: processes over which parameters, gradients and optimizer state are sharded.
        context: processes that each hold a part of every sequence.
        tensor: processes that each hold a part of every layer.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(self.degrees().values())

    @property
    def data(self) -> int:
        """Number of processes that read different sequences."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Number of processes over which FSDP2 shards: those of a context share the work of a sequence, not memory."""
        return self.shard * self.context

    @property
    def label(self) -> str:
        """Short form for tables: `dp_r2·dp_s4·tp2`, or `single`."""
        parts = [f"{short}{getattr(self, axis)}" for axis, short in SHORT.items() if getattr(self, axis) > 1]
        return "·".join(parts) or "single"

    def degrees(self) -> dict[str, int]:
        """Degree by axis, in mesh order (outermost first)."""
        return {axis: getattr(self, axis) for axis in AXES}


def resolve_layout(degrees: dict[str, int], world: int | None) -> Layout:
    """The layout with its one degree of -1, if any, computed from the world size.

    Raises:
        ConfigError: a degree is neither positive nor -1, two are -1, -1 without a world, or a
            product that is not the world size.
    """
    for axis, degree in degrees.items():
        if degree < 1 and degree != -1:
            raise ConfigError(f"parallelism.{axis}", degree, "a degree is at least 1, or -1 for the rest", "try 1")
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    if not open_axes:
        if world is not None and known != world:
            rule = f"the degrees make {known} ({_product(degrees)})"
            raise ConfigError("world", world, rule, f"try world={known}, or a degree of -1 for the rest")
        return Layout(**degrees)
    axis = open_axes[0]
    key = f"parallelism.{axis}"
    if len(open_axes) > 1:
        other = open_axes[1]
        raise ConfigError(
            key,
            -1,
            f"only one degree may be -1, and parallelism.{other} is too",
            f"try parallelism.{other}=1",
        )
    if world is None:
        raise ConfigError(key, -1, "says 'the rest' of a world whose size is not given", f"try world=2, or {key}=2")
    if world % known:
        raise ConfigError(
            "world",
            world,
            f"the other degrees make {known}, which does not divide it",
            f"try world={known * max(1, world // known)}",
        )
    return Layout(**{**degrees, axis: world // known})


def _product(degrees: dict[str, int]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "all are 1"

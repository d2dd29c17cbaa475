"""Efficiencies: the parameters of the time model that are fitted to measured runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

# Written by `benchmarks/planner_fit.py`, with the date, the number of runs and the error.
FILE = Path(__file__).with_name("efficiencies.json")
KEY = "cluster.efficiencies"


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Parameters of the time model.

    Attributes:
        product: of matrix products, as a share of the largest rate that was measured on the device.
        attention: of attention, as a share of the largest published rate of its kernel on the device.
        eager_memory: share of the memory bandwidth that kernels of separate operations reach.
        fused_memory: the same for kernels that a compiler has made of several operations, and for the optimizer's.
        link: share of the bandwidth between devices of a node that collectives reach.
        network: the same between nodes.
        overlap: κ, time of computation and communication that run together, as a multiple of the shorter of both,
            κ·min(C, X) + |C − X|: they share memory bandwidth and multiprocessors. At least 1.
        stragglers: additional time for each doubling of the number of nodes, as a share of the step.
        latency: fixed time of a collective and of the hops of its ring, as a multiple of the machine's.
        launch_seconds: of a kernel, between the end of the one before it and its own full speed.
    """

    product: float = 0.9
    attention: float = 0.8
    eager_memory: float = 0.6
    fused_memory: float = 0.8
    link: float = 0.7
    network: float = 0.7
    overlap: float = 1.15
    stragglers: float = 0.005
    latency: float = 1.0
    launch_seconds: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least, most = LIMITS[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                rule = f"must lie between {least:g} and {most:g}"
                raise ConfigError(f"{KEY}.{name}", value, rule, f"try {DEFAULTS[name]:g}, or leave it out")


# Physical limits: no share is above 1, and κ lies between perfect overlap and running one after the other.
LIMITS: Mapping[str, tuple[float, float]] = {
    "product": (0.01, 1.0),
    "attention": (0.01, 1.0),
    "eager_memory": (0.01, 1.0),
    "fused_memory": (0.01, 1.0),
    "link": (0.01, 1.0),
    "network": (0.01, 1.0),
    "overlap": (1.0, 2.0),
    "stragglers": (0.0, 0.2),
    "latency": (0.01, 1000.0),
    "launch_seconds": (0.0, 1e-2),
}
DEFAULTS: Mapping[str, float] = {
    field.name: float(field.default)  # type: ignore[arg-type]
    for field in dataclasses.fields(Efficiencies)
}


def changed(base: Efficiencies, values: Mapping[str, Any]) -> Efficiencies:
    """Efficiencies with other values, by name.

    Raises:
        ConfigError: a name is unknown, or a value is outside its limits.
    """
    for name, value in values.items():
        if name not in LIMITS:
            raise ConfigError(f"{KEY}.{name}", value, "is no efficiency", f"there are {', '.join(LIMITS)}")
    return dataclasses.replace(base, **values)


def file_text(efficiencies: Efficiencies, facts: Mapping[str, Any]) -> str:
    """Content of the file: how the values were found, and the values."""
    values = {name: _rounded(value) for name, value in dataclasses.asdict(efficiencies).items()}
    return json.dumps({**facts, "efficiencies": values}, indent=2) + "\n"


@functools.cache
def fitted() -> Efficiencies:
    """The efficiencies that were fitted to published runs."""
    return changed(Efficiencies(), json.loads(FILE.read_text())["efficiencies"])


@functools.cache
def allocator_excess() -> float:
    """Reserved bytes for each allocated byte: what published runs had over the estimate of their tensors."""
    return float(json.loads(FILE.read_text())["allocator_excess"])


def _rounded(value: float) -> float:
    """Four digits: more are not known."""
    return 0.0 if value == 0 else round(value, 3 - math.floor(math.log10(abs(value))))

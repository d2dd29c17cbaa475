"""A cluster from rates that were measured on it: products by shape, memory, collectives by size."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.errors import ConfigError
from titanlab.plan.calibration import fit_sum
from titanlab.plan.machine import LIMITS, AxisPlacement, Machine, machine_of
from titanlab.recipe import Cluster, Recipe
from titanlab.techniques.profiler import profilers_schema as names

KEY = "--measure"
_LOCAL = (names.PRODUCT, names.ATTENTION, names.COPY, names.POINTWISE, names.LAUNCH)
# The efficiency that collectives of a group say.
_LINKS = {names.NODE: "link", names.WORLD: "network"}
# How figures are shown: divisor, unit, digits.
_UNITS: Mapping[str, tuple[float, str, int]] = {
    names.PRODUCT: (1e9, "GFLOP/s", 1),
    names.ATTENTION: (1e9, "GFLOP/s", 1),
    names.COPY: (1e9, "GB/s", 1),
    names.POINTWISE: (1e9, "GB/s", 1),
    names.LAUNCH: (1e-6, "µs", 2),
    names.PROCESS: (1e9, "GB", 2),
}
# By which share the largest collective must take longer than one of no bytes: a smaller one is noise.
_LEAST_GROWTH = 0.02
# Squares that are too small to say how fast a model's products are.
_SMALL_SQUARES = 2


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """One measured collective.

    Attributes:
        group: `node`, or `world` where the ranks are on several nodes.
        kind: `all_reduce`, `all_gather` or `all_to_all`.
        size: bytes of the whole tensor.
    """

    group: str
    ranks: int
    kind: str
    size: int
    seconds: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends."""
        return (2 if self.kind == "all_reduce" else 1) * self.size * (self.ranks - 1) / self.ranks

    @property
    def hops(self) -> int:
        """The number of hops of its ring."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1)


def measured_cluster(recipe: Recipe, row: Mapping[str, Any]) -> Cluster:
    """The cluster of a recipe with what `profiler=rates` has measured on it.

    Raises:
        ConfigError: a figure is missing, or is no positive number.
    """
    figures = _checked(row)
    cluster = dataclasses.replace(recipe.cluster, efficiencies={})
    products = [rate for name, rate in figures.items() if name.startswith(names.PRODUCT)]
    # The fastest product, and the median of those that have the size of a model's.
    best, typical = max(products), statistics.median(products[_SMALL_SQUARES:] or products)
    memory = max(figures[names.COPY], figures[names.POINTWISE])
    if cluster.peak_tflops is None and (cluster.accelerator == "cpu" or not _is_known(recipe)):
        cluster = dataclasses.replace(cluster, peak_tflops=best / 1e12, memory_gb_per_second=memory / 1e9)
    machine = machine_of(dataclasses.replace(recipe, cluster=cluster))
    memory = max(memory, 0.0 if cluster.accelerator == "cpu" else machine.memory_bytes_per_second)
    shares = {
        "product": typical / machine.product_rate("bfloat16"),
        "attention": figures[names.ATTENTION] / machine.attention_flops,
        "eager_memory": figures[names.POINTWISE] / memory,
        "fused_memory": figures[names.COPY] / memory,
        "launch_seconds": figures[names.LAUNCH],
    }
    cluster = dataclasses.replace(cluster, memory_gb_per_second=memory / 1e9)
    if cluster.accelerator == "cpu":
        cluster = dataclasses.replace(cluster, process_gb=figures[names.PROCESS] / 1e9, allocator_excess=1.0)
    exchanges = _exchanges(figures)
    for group in _LINKS:
        own = [exchange for exchange in exchanges if exchange.group == group]
        if own:
            cluster = _with_link(cluster, shares, own, machine)
    limited = {name: min(max(share, LIMITS[name][0]), LIMITS[name][1]) for name, share in shares.items()}
    return dataclasses.replace(cluster, efficiencies=limited)


def doubts(row: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """A line for each link of a measured cluster that has no bandwidth although collectives were measured on it."""
    groups = {exchange.group for exchange in _exchanges(_checked(row))}
    return [
        f"no bandwidth of the {name}: the times of its collectives do not grow with their sizes; measure again "
        "while nothing else runs, or with larger ones: profiler.megabytes=64"
        for group, name in _LINKS.items()
        if group in groups and name not in cluster.efficiencies
    ]


def rate_lines(row: Mapping[str, Any]) -> list[str]:
    """What was measured, as text.

    Raises:
        ConfigError: a figure is missing, or is no positive number.
    """
    figures = _checked(row)
    text = []
    for name, value in figures.items():
        unit = next((unit for start, unit in _UNITS.items() if name.startswith(start)), None)
        if unit is not None:
            label = name.removeprefix("rates/").partition("(")[0]
            text.append(f"{label:22} {value / unit[0]:9,.{unit[2]}f} {unit[1]}")
    exchanges = _exchanges(figures)
    if not exchanges:
        return [*text, "one process: no collective was measured"]
    for group, ranks in dict.fromkeys((exchange.group, exchange.ranks) for exchange in exchanges):
        own = [exchange for exchange in exchanges if (exchange.group, exchange.ranks) == (group, ranks)]
        kinds = list(dict.fromkeys(exchange.kind for exchange in own))
        where = "of a node" if group == names.NODE else "of several nodes"
        text += ["", f"µs, {ranks} ranks {where:13}" + "".join(f"{kind:>12}" for kind in kinds)]
        for size in dict.fromkeys(exchange.size for exchange in own):
            times = {exchange.kind: exchange.seconds for exchange in own if exchange.size == size}
            cells = "".join(f"{times[kind] * 1e6:12,.0f}" if kind in times else " " * 12 for kind in kinds)
            text.append(f"{size / 1024:20,.0f} KiB  {cells}")
    return text


def _checked(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row.

    Raises:
        ConfigError: one is missing, or is no positive number.
    """
    figures = {name: value for name, value in row.items() if name.startswith("rates/")}
    for name in _LOCAL:
        if not any(known.startswith(name) for known in figures):
            raise ConfigError(KEY, name, "is missing in the measurement", "measure again")
    for name, value in figures.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(KEY, value, f"is no figure of {name}", "measure again")
    return figures


def _is_known(recipe: Recipe) -> bool:
    try:
        machine_of(recipe)
    except ConfigError:
        return False
    return True


def _exchanges(figures: Mapping[str, float]) -> list[MeasuredCollective]:
    exchanges = []
    for name, seconds in figures.items():
        if not name.startswith(names.COLLECTIVE):
            continue
        try:
            group, ranks, kind, size = name.removeprefix(names.COLLECTIVE).split()
            exchanges.append(
                MeasuredCollective(group=group, ranks=int(ranks), kind=kind, size=int(size), seconds=seconds)
            )
        except ValueError:
            raise ConfigError(KEY, name, "is no name of a collective", "measure again") from None
    return exchanges


def _with_link(
    cluster: Cluster, shares: dict[str, float], exchanges: Sequence[MeasuredCollective], machine: Machine
) -> Cluster:
    """The cluster with the bandwidth of measured collectives; adds their efficiency and latency to `shares`.

    seconds = latency · nominal + bytes / bandwidth: divided by the nominal fixed time, a line.
    """
    group = exchanges[0].group
    nodes = 1 if group == names.NODE else 2
    fixed = [
        machine.collective_seconds(AxisPlacement(ranks=own.ranks, in_node=own.ranks, nodes=nodes), 0.0, hops=own.hops)
        for own in exchanges
    ]
    sizes = [own.wire_bytes / nominal for own, nominal in zip(exchanges, fixed, strict=True)]
    times = [own.seconds / nominal for own, nominal in zip(exchanges, fixed, strict=True)]
    constant, slope = fit_sum([[1.0] * len(sizes), sizes], times)
    shares["latency"] = max(shares.get("latency", 0.0), constant)
    if slope * max(sizes) <= _LEAST_GROWTH * constant:
        return cluster
    nominal = (machine.link_bytes_per_second if nodes == 1 else machine.network_bytes_per_second) / 1e9
    reached = 1 / slope / 1e9
    if nodes > 1:
        # A ring that leaves its node uses the adapters of all its ranks there.
        reached /= max(1, min(exchanges[0].ranks, machine.per_node))
    shares[_LINKS[group]] = reached / max(nominal, reached)
    if nodes == 1:
        return dataclasses.replace(cluster, link_gb_per_second=max(nominal, reached))
    return dataclasses.replace(cluster, network_gb_per_second=max(nominal, reached))

"""A machine: devices of a cluster, their connections, and the efficiencies that were fitted to measured runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.costs import AXES, FSDP_AXES, Layout, hardware
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster, Recipe

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
    # Four digits: more are not known.
    values = {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(efficiencies).items()}
    return json.dumps({**facts, "efficiencies": values}, indent=2) + "\n"


@functools.cache
def fitted() -> Efficiencies:
    """The efficiencies that were fitted to published runs."""
    return changed(Efficiencies(), json.loads(FILE.read_text())["efficiencies"])


@functools.cache
def allocator_excess() -> float:
    """Reserved bytes for each allocated byte: what published runs had over the estimate of their tensors."""
    return float(json.loads(FILE.read_text())["allocator_excess"])


# Devices of which no measured rate is known: share of the peak that a product reaches. It is that of an H100 (MAMF,
# stas00/ml-engineering, compute/accelerator).
_ATTAINABLE = 0.803
_NOT_MEASURED = "no rate of {device} was measured: products are taken to reach {share:.0%} of its peak, as on an H100"
# Rate of FlashAttention 2 as a share of the peak in bfloat16: up to 230 of 312 TFLOP/s on an A100, up to 335 of 989 on
# an H100, whose new instructions it does not use (arXiv 2307.08691, section 4.1). Devices after it are taken as H100.
_ATTENTION = {"A100": 0.73}
_LATER_ATTENTION = 0.34
# Fixed time of a collective inside a node and between nodes, and of each hop of its ring: the first two are Calculon's
# (systems/h100_80g_nvl8.json), the others those of NCCL's model of rings (tuning.cc, LL128 and Simple).
_LINK_SECONDS, _NETWORK_SECONDS = 10e-6, 20e-6
_LINK_HOP, _NETWORK_HOP = 1.9e-6, 14e-6
# Memory and link of a core whose rates nobody has measured, in GB/s; memory of a process with torch imported, in GB.
_CPU_MEMORY, _CPU_LINK, _CPU_PROCESS = 20.0, 4.0, 0.45
_ROUGH = "no rates of these CPUs were measured, times are rough: titanlab plan --measure, or --calibrate SWEEP"
# A network adapter of 400 Gb/s for each device, where the cluster does not say it.
_NETWORK = 50e9


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """One kind of device, and its connections; bytes and seconds. Equal only to itself, so that it can be a key.

    Attributes:
        memory_bytes: of a device; infinite if not known.
        peak_flops: dense peak by torch's name of a dtype.
        product_flops: largest measured rate of a matrix product by dtype.
        attention_flops: largest rate of the attention's kernel.
        per_node: devices of a node, or of neighbouring nodes that share a link.
        link_bytes_per_second: between devices of a node, one direction.
        network_bytes_per_second: of one device's share of the network between nodes, one direction.
        link_seconds, network_seconds: fixed time of a collective.
        link_hop_seconds, network_hop_seconds: of each hop of its ring.
        efficiencies: shares of these rates that runs reach.
        allocator_excess: reserved bytes for each byte of tensors.
        message_excess: bytes that a process keeps for each byte that it exchanges in a microbatch.
        process_bytes: memory of a process without tensors, which counts where the device's memory is the host's.
        notes: what the figures assume, a line each.
    """

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float]
    product_flops: Mapping[str, float]
    attention_flops: float
    memory_bytes_per_second: float
    per_node: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    link_seconds: float = _LINK_SECONDS
    network_seconds: float = _NETWORK_SECONDS
    link_hop_seconds: float = _LINK_HOP
    network_hop_seconds: float = _NETWORK_HOP
    efficiencies: Efficiencies = field(default_factory=fitted)
    allocator_excess: float = field(default_factory=allocator_excess)
    message_excess: float = 0.0
    process_bytes: float = 0.0
    notes: tuple[str, ...] = ()

    def product_rate(self, dtype: str) -> float:
        """Attainable FLOP/s of products; a device without the format multiplies in bfloat16, or in what it has."""
        rates = self.product_flops
        return rates.get(dtype) or rates.get("bfloat16") or min(rates.values())

    def reserved_bytes(self, allocated: float) -> int:
        """Bytes that a process takes from its device for tensors of so many bytes, without those of messages."""
        return round(allocated * self.allocator_excess + self.process_bytes)

    def collective_seconds(
        self, axis: AxisPlacement, wire_bytes: float, *, count: float = 1.0, hops: int | None = None
    ) -> float:
        """Time of collectives on one axis: fixed + hops · latency + bytes / (bandwidth × efficiency).

        Args:
            wire_bytes: bytes that a rank sends, over all collectives: bytes·(n−1)/n for a gather.
            hops: of each; None: those of a ring, one less than its ranks.
        """
        if axis.ranks == 1 or count == 0:
            return 0.0
        between = min(axis.nodes, axis.ranks) - 1 if axis.nodes > 1 else 0
        steps = axis.ranks - 1 if hops is None else hops
        between = min(between, steps)
        latency = between * self.network_hop_seconds + (steps - between) * self.link_hop_seconds
        fixed = self.network_seconds if axis.nodes > 1 else self.link_seconds
        return count * (fixed + latency) * self.efficiencies.latency + wire_bytes / self.bandwidth(axis)

    def bandwidth(self, axis: AxisPlacement) -> float:
        """Bytes per second of a ring over the ranks of an axis.

        A ring that leaves its node uses the network adapters of all its ranks there.
        """
        link = self.link_bytes_per_second * self.efficiencies.link
        if axis.nodes == 1:
            return link
        network = self.network_bytes_per_second * self.efficiencies.network * axis.in_node
        return min(link, network) if axis.in_node > 1 else network


@dataclass(frozen=True, kw_only=True)
class AxisPlacement:
    """The ranks of one group: their number, how many of them are on one node, and on how many nodes they are."""

    ranks: int
    in_node: int
    nodes: int


@functools.lru_cache(maxsize=4096)
def axis_of(layout: Layout, name: str, per_node: int) -> AxisPlacement:
    """The ranks of an axis: inner axes are neighbours, so they fill nodes first.

    Args:
        name: an axis of the layout, `fsdp` for those over which FSDP2 shards, or `world`.
    """
    if name == "world":
        names: tuple[str, ...] = tuple(AXES)
    else:
        names = tuple(FSDP_AXES) if name == "fsdp" else (name,)
    ranks = math.prod(getattr(layout, axis) for axis in names)
    last = max(AXES.index(axis) for axis in names)
    inner = math.prod(getattr(layout, axis) for axis in AXES[last + 1 :])
    in_node = max(1, min(ranks, per_node // inner))
    return AxisPlacement(ranks=ranks, in_node=in_node, nodes=-(-ranks // in_node))


def expert_axis(layout: Layout, name: str, per_node: int) -> AxisPlacement:
    """The ranks that share experts, `expert`, which are neighbours; or those that share a part, `expert_shard`."""
    ranks, inner = (layout.expert, 1) if name == "expert" else (max(1, layout.expert_shard), layout.expert)
    in_node = max(1, min(ranks, per_node // inner))
    return AxisPlacement(ranks=ranks, in_node=in_node, nodes=-(-ranks // in_node))


def machine_of(recipe: Recipe) -> Machine:
    """The machine of a recipe's cluster.

    Raises:
        ConfigError: the cluster names no device, or nothing is known of the device.
    """
    cluster = recipe.cluster
    if cluster.accelerator == "cpu":
        return _cpu(cluster)
    if cluster.device is None:
        raise ConfigError("cluster.device", None, "an estimate needs a device", "try cluster=h100, or cluster=cpu")
    device = hardware.find_device(cluster.device)
    if device is None and cluster.peak_tflops is not None and cluster.memory_gb_per_second is not None:
        device = _measured(cluster)
    if device is None:
        known = ", ".join(other.name for other in hardware.DEVICES)
        raise ConfigError("cluster.device", cluster.device, "nothing is known of its speed", f"known are {known}")
    bandwidth = cluster.memory_gb_per_second or device.memory_gb_per_second
    if bandwidth is None:
        rule = "has no bandwidth of memory in the table of devices"
        raise ConfigError("cluster.device", cluster.device, rule, "try cluster=h100")
    peaks = {dtype: rate * 1e12 for dtype, rate in device.peak_tflops.items()}
    # A device may have no figure in float8: it computes those products in bfloat16.
    products = {dtype: _ATTAINABLE * peak for dtype, peak in peaks.items()}
    products.update({dtype: rate * 1e12 for dtype, rate in device.product_tflops.items()})
    if cluster.peak_tflops is not None:
        scale = cluster.peak_tflops * 1e12 / peaks["bfloat16"]
        peaks = {dtype: rate * scale for dtype, rate in peaks.items()}
        products = {dtype: rate * scale for dtype, rate in products.items()}
    attention = next((share for word, share in _ATTENTION.items() if word in device.words), _LATER_ATTENTION)
    link = (cluster.link_gb_per_second or device.link_gb_per_second or 0.0) * 1e9
    network = cluster.network_gb_per_second * 1e9 if cluster.network_gb_per_second else _NETWORK
    memory = cluster.memory_gb or device.memory_gb
    return Machine(
        name=device.name,
        memory_bytes=memory * 1e9 if memory else math.inf,
        peak_flops=peaks,
        product_flops=products,
        attention_flops=attention * peaks["bfloat16"],
        memory_bytes_per_second=bandwidth * 1e9,
        per_node=(cluster.per_node or 8) * cluster.linked_nodes,
        # Devices without a link of their own use the network also inside a node.
        link_bytes_per_second=link or network,
        network_bytes_per_second=network,
        efficiencies=changed(fitted(), cluster.efficiencies),
        allocator_excess=cluster.allocator_excess or allocator_excess(),
        message_excess=cluster.message_excess or 0.0,
        process_bytes=(cluster.process_gb or 0.0) * 1e9,
        notes=() if device.product_tflops else (_NOT_MEASURED.format(device=device.name, share=_ATTAINABLE),),
    )


def _measured(cluster: Cluster) -> hardware.Device:
    """A device that is in no table: its peak is the rate that its products were measured to reach."""
    assert cluster.peak_tflops is not None
    rates = {"bfloat16": cluster.peak_tflops}
    return hardware.Device(
        name=str(cluster.device), words="", peak_tflops=rates, product_tflops=rates, source="measured",
        memory_gb_per_second=cluster.memory_gb_per_second, link_gb_per_second=cluster.link_gb_per_second,
    )  # fmt: skip


def _cpu(cluster: Cluster) -> Machine:
    """A core or several for each process, and gloo over loopback.

    What the cluster does not say is what a fast core could do: 3 GHz with two fused products and sums of sixteen
    float32 numbers in a cycle, 20 GB/s of memory, 4 GB/s and 100 µs for a collective.
    """
    peak = cluster.peak_tflops * 1e12 if cluster.peak_tflops is not None else 3e9 * 2 * 16 * 2
    link = cluster.link_gb_per_second or _CPU_LINK
    network = cluster.network_gb_per_second or link
    return Machine(
        name="CPU",
        memory_bytes=cluster.memory_gb * 1e9 if cluster.memory_gb else math.inf,
        peak_flops={"float32": peak},
        product_flops={"float32": peak},
        attention_flops=peak,
        memory_bytes_per_second=(cluster.memory_gb_per_second or _CPU_MEMORY) * 1e9,
        per_node=cluster.per_node or 8,
        link_bytes_per_second=link * 1e9,
        network_bytes_per_second=network * 1e9,
        link_seconds=100e-6,
        network_seconds=100e-6,
        link_hop_seconds=50e-6,
        network_hop_seconds=50e-6,
        efficiencies=changed(fitted(), cluster.efficiencies),
        allocator_excess=cluster.allocator_excess or 1.0,
        message_excess=cluster.message_excess or 0.0,
        process_bytes=(cluster.process_gb or _CPU_PROCESS) * 1e9,
        notes=() if cluster.memory_gb_per_second else (_ROUGH,),
    )

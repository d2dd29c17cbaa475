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

from titanlab.costs import AXES, FLASH3, FSDP_AXES, FUSED, Capability, Layout, attention_rates, hardware, order
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster, Recipe

# Written by `benchmarks/planner_fit.py`, with the date, the number of runs and the error.
FILE = Path(__file__).with_name("efficiencies.json")
KEY = "cluster.efficiencies"


def _within(default: float, *, least: float = 0.01, most: float = 1.0) -> Any:
    """A field of `Efficiencies` with its physical limits; by default it is a share, which is at most 1."""
    return field(default=default, metadata={"limits": (least, most)})


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Parameters of the time model.

    Attributes:
        product: rate of matrix products, as a share of the rate that the device sustains.
        attention: rate of attention, as a share of the measured rate of its kernel on the device.
        eager_memory: share of the memory bandwidth that kernels of separate operations reach.
        fused_memory: the same for kernels that a compiler has made of several operations, and for the optimizer's.
        link: share of the bandwidth between devices of a node that collectives achieve.
        network: share of the bandwidth between nodes that collectives achieve.
        overlap: κ: computation C and communication X that run together take κ·min(C, X) + |C − X|, because both use
            memory bandwidth and multiprocessors.
        stragglers: additional time for each doubling of the number of nodes, as a share of the step.
        latency: fixed time of a collective and of the hops of its ring, as a multiple of the machine's nominal times.
        launch_seconds: time between the end of a kernel and the full speed of the next one.
        host_seconds: host time to start one kernel in eager mode.
        hook_seconds: host time for one collective of FSDP2 or of tensor parallelism: its hooks, and the dispatch of
            DTensor or of the autograd function around the collective.
    """

    product: float = _within(0.9)
    attention: float = _within(0.8)
    eager_memory: float = _within(0.6)
    fused_memory: float = _within(0.8)
    link: float = _within(0.7)
    network: float = _within(0.7)
    # 1 is perfect overlap; 2 is no overlap.
    overlap: float = _within(1.15, least=1.0, most=2.0)
    stragglers: float = _within(0.005, least=0.0, most=0.2)
    latency: float = _within(1.0, most=1000.0)
    launch_seconds: float = _within(5e-6, least=0.0, most=1e-2)
    host_seconds: float = _within(20e-6, least=0.0, most=1e-2)
    hook_seconds: float = _within(300e-6, least=0.0, most=1e-1)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, (least, most) = getattr(self, each.name), LIMITS[each.name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and least <= value <= most):
                rule = f"must lie between {least:g} and {most:g}"
                raise ConfigError(f"{KEY}.{each.name}", value, rule, f"try {each.default:g}, or leave it out")


LIMITS: Mapping[str, tuple[float, float]] = {
    each.name: each.metadata["limits"] for each in dataclasses.fields(Efficiencies)
}


# The efficiencies that are seconds of the host.
HOST = ("host_seconds", "hook_seconds")


def changed(base: Efficiencies, values: Mapping[str, Any]) -> Efficiencies:
    """The efficiencies `base`, some of them replaced by `values` (name → value).

    Raises:
        ConfigError: a name is unknown, or a value is outside its limits.
    """
    for name, value in values.items():
        if name not in LIMITS:
            raise ConfigError(f"{KEY}.{name}", value, "is not an efficiency", f"there are {', '.join(LIMITS)}")
    return dataclasses.replace(base, **values)


@functools.cache
def fitted() -> Efficiencies:
    return changed(Efficiencies(), json.loads(FILE.read_text())["efficiencies"])


@functools.cache
def allocator_excess() -> float:
    """Reserved bytes for each byte that the planner estimates for tensors: the median of published runs."""
    return float(json.loads(FILE.read_text())["allocator_excess"])


@functools.cache
def memory_error() -> float:
    """Median error of estimated memory, as a share of what published runs reserved, cross-validated."""
    return float(json.loads(FILE.read_text())["memory_error"])


# Share of the peak that products reach on a device without a measured rate; measured on an H200.
_ATTAINABLE = 0.681
_NOT_MEASURED = "no rate of {device} was measured: products are taken to reach {share:.0%} of its peak, as on an H200"
# The words for attention's passes in the names of its rates, such as `cudnn backward`.
FORWARD, BACKWARD = "forward", "backward"
# Seconds of a collective in addition to its transfer of bytes, inside a node and between nodes: fixed seconds, from
# Calculon (systems/h100_80g_nvl8.json), and seconds of each hop of its ring, from NCCL (tuning.cc, LL128 and Simple).
_LINK_SECONDS, _NETWORK_SECONDS = 10e-6, 20e-6
_LINK_HOP, _NETWORK_HOP = 1.9e-6, 14e-6
# GB of memory of a process on a CPU that has imported torch.
_CPU_PROCESS = 0.45
_ROUGH = "no rates of these CPUs were measured, times are rough: titanlab plan --measure, or --calibrate SWEEP"
# GB/s of a device's network if the cluster does not say it: an adapter of 400 Gb/s for each device.
_NETWORK = 50.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """One kind of device and its connections, in bytes and seconds. Compared by identity, so that it can be a key.

    Attributes:
        memory_bytes: memory of a device; infinite if not known.
        peak_flops: torch's name of a dtype → dense peak FLOP/s.
        product_flops: dtype → FLOP/s that matrix products sustain.
        attention_flops: kernel and direction, such as `cudnn backward` → FLOP/s of attention.
        capability: NVIDIA's compute capability, which decides the kernel of attention; None: not known.
        per_node: devices of a node, or of neighbouring nodes that share a link.
        link_bytes_per_second: bandwidth between devices of a node, one direction.
        network_bytes_per_second: bandwidth of one device's share of the network between nodes, one direction.
        link_seconds, network_seconds: fixed time of a collective inside a node, and between nodes.
        link_hop_seconds, network_hop_seconds: time of each hop of the collective's ring.
        efficiencies: shares of these rates that runs reach.
        allocator_excess: reserved bytes for each byte of tensors.
        message_excess: bytes that a process keeps for each byte that it exchanges in a microbatch.
        process_bytes: memory of a process without tensors, for devices whose memory is the host's.
        notes: what the figures assume, a line each.
    """

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float]
    product_flops: Mapping[str, float]
    attention_flops: Mapping[str, float]
    memory_bytes_per_second: float
    per_node: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    capability: Capability | None = None
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
        """FLOP/s that products in a dtype sustain; without a rate for it, bfloat16's or the slowest dtype's."""
        rates = self.product_flops
        bfloat16 = rates.get("bfloat16") or min(rates.values())
        # Tensor cores do not multiply in float32. Without a figure, take 1/16 of bfloat16, which is an A100's ratio.
        return rates.get(dtype) or (bfloat16 / 16 if dtype == "float32" else bfloat16)

    def flops_per_second(self, rate: str) -> float:
        """FLOP/s in a step, of products in a dtype, or of an attention kernel in one direction.

        A kernel without a rate counts as slow as the slowest kernel.
        """
        if rate.endswith((FORWARD, BACKWARD)):
            own = [value for name, value in self.attention_flops.items() if name.endswith(rate.rpartition(" ")[2])]
            return (self.attention_flops.get(rate) or min(own)) * self.efficiencies.attention
        return self.product_rate(rate) * self.efficiencies.product

    def attention_kernel(self, name: str, *, dtype: str, head_dim: int, seq_len: int) -> str:
        """The kernel that the trainer tries first if a recipe names `name`."""
        return order(name, self.capability, dtype=dtype, head_dim=head_dim, seq_len=seq_len)[0]

    def reserved_bytes(self, allocated: float) -> int:
        """Bytes of its device that a process takes for `allocated` bytes of tensors, without buffers of messages."""
        return round(allocated * self.allocator_excess + self.process_bytes)

    def collective_seconds(
        self, axis: AxisPlacement, wire_bytes: float, *, count: float = 1.0, hops: int | None = None
    ) -> float:
        """Seconds of collectives on one axis: count · (fixed + hop time) · latency + bytes / (bandwidth · efficiency).

        Args:
            wire_bytes: bytes that a rank sends in all these collectives: bytes·(n−1)/n for a gather.
            hops: hops of each collective; None: those of a ring, one less than its ranks.
        """
        if axis.ranks == 1 or count == 0:
            return 0.0
        between = min(axis.nodes, axis.ranks) - 1 if axis.nodes > 1 else 0
        steps = axis.ranks - 1 if hops is None else hops
        between = min(between, steps)
        latency = between * self.network_hop_seconds + (steps - between) * self.link_hop_seconds
        fixed = self.network_seconds if axis.nodes > 1 else self.link_seconds
        return count * (fixed + latency) * self.efficiencies.latency + wire_bytes / self.bandwidth(axis)

    def tree_seconds(self, axis: AxisPlacement, size: float) -> float:
        """Seconds of a small all-reduce: NCCL sends it up and down a tree of nodes, with a chain inside each node."""
        if axis.ranks == 1:
            return 0.0
        fixed = self.network_seconds if axis.nodes > 1 else self.link_seconds
        hops = math.ceil(math.log2(axis.nodes)) * self.network_hop_seconds + (axis.in_node - 1) * self.link_hop_seconds
        return (fixed + 2 * hops) * self.efficiencies.latency + 2 * size / self.bandwidth(axis)

    def bandwidth(self, axis: AxisPlacement) -> float:
        """Bytes per second of a ring over the ranks of an axis.

        A ring that leaves a node uses the network adapters of all its ranks on that node.
        """
        link = self.link_bytes_per_second * self.efficiencies.link
        if axis.nodes == 1:
            return link
        network = self.network_bytes_per_second * self.efficiencies.network * axis.in_node
        return min(link, network) if axis.in_node > 1 else network


@dataclass(frozen=True, kw_only=True)
class AxisPlacement:
    """The ranks of one group: their number, the number on one node, and the number of nodes."""

    ranks: int
    in_node: int
    nodes: int


@functools.lru_cache(maxsize=4096)
def axis_of(layout: Layout, name: str, per_node: int) -> AxisPlacement:
    """The placement of an axis's ranks on nodes. Ranks of inner axes are neighbours, so they fill nodes first.

    Args:
        name: an axis of the layout; `world`; `fsdp`, the axes over which FSDP2 shards; `expert`, the neighbouring ranks
            over which experts are divided; or `expert_shard`, the ranks that share one part of the experts.
    """
    if name in ("expert", "expert_shard"):
        ranks, inner = (layout.expert, 1) if name == "expert" else (max(1, layout.expert_shard), layout.expert)
    else:
        names = {"world": AXES, "fsdp": FSDP_AXES}.get(name, (name,))
        ranks = math.prod(getattr(layout, axis) for axis in names)
        last = max(AXES.index(axis) for axis in names)
        inner = math.prod(getattr(layout, axis) for axis in AXES[last + 1 :])
    in_node = max(1, min(ranks, per_node // inner))
    return AxisPlacement(ranks=ranks, in_node=in_node, nodes=-(-ranks // in_node))


def machine_of(recipe: Recipe) -> Machine:
    """The machine of a recipe's cluster.

    Raises:
        ConfigError: the cluster names no device, or nothing is known of the device.
    """
    cluster, is_cpu = recipe.cluster, recipe.cluster.accelerator == "cpu"
    device = _device_of(cluster)
    bandwidth = cluster.memory_gb_per_second or device.memory_gb_per_second
    if bandwidth is None:
        rule = "has no bandwidth of memory in the table of devices"
        raise ConfigError("cluster.device", cluster.device, rule, "try cluster=h100")
    peaks = {dtype: rate * 1e12 for dtype, rate in device.peak_tflops.items()}
    # A device may have no figure in float8: `Machine.product_rate` then takes bfloat16.
    products = {dtype: _ATTAINABLE * peak for dtype, peak in peaks.items()}
    products.update({dtype: rate * 1e12 for dtype, rate in device.product_tflops.items()})
    if cluster.peak_tflops is not None and not is_cpu:
        scale = cluster.peak_tflops * 1e12 / peaks["bfloat16"]
        peaks = {dtype: rate * scale for dtype, rate in peaks.items()}
        products = {dtype: rate * scale for dtype, rate in products.items()}
    memory = cluster.memory_gb or device.memory_gb
    link = cluster.link_gb_per_second or device.link_gb_per_second
    network = cluster.network_gb_per_second or (link if is_cpu else None) or _NETWORK
    # A CPU is its own host: the rates of its operators include the time of the calls.
    efficiencies = changed(fitted(), dict.fromkeys(HOST, 0.0)) if is_cpu else fitted()
    capability = None if is_cpu else hardware.compute_capability(device.words)
    if is_cpu:
        attention = dict.fromkeys((FORWARD, BACKWARD), peaks["float32"])
        notes = () if cluster.memory_gb_per_second else (_ROUGH,)
        seconds = {"link_seconds": 100e-6, "network_seconds": 100e-6}
        seconds |= {"link_hop_seconds": 50e-6, "network_hop_seconds": 50e-6}
    else:
        known, seconds = attention_rates(capability), {}
        limit, peak = hardware.power_share(device.watts, known.watts), peaks["bfloat16"]
        attention = {
            f"{name} {direction}": share * peak * limit
            for name, shares in known.shares.items()
            for direction, share in zip((FORWARD, BACKWARD), shares, strict=True)
        }
        limit = hardware.power_share(device.watts, device.product_watts)
        products = {dtype: rate * limit for dtype, rate in products.items()}
        notes = () if device.product_tflops else (_NOT_MEASURED.format(device=device.name, share=_ATTAINABLE),)
    attention = {**attention, **_measured_attention(cluster)}
    return Machine(
        name=device.name,
        memory_bytes=memory * 1e9 if memory else math.inf,
        peak_flops=peaks,
        product_flops=products,
        attention_flops=attention,
        capability=capability,
        memory_bytes_per_second=bandwidth * 1e9,
        per_node=(cluster.per_node or 8) * (1 if is_cpu else cluster.linked_nodes),
        # Devices without links use the network also inside a node.
        link_bytes_per_second=(link or network) * 1e9,
        network_bytes_per_second=network * 1e9,
        **seconds,
        efficiencies=changed(efficiencies, cluster.efficiencies),
        allocator_excess=cluster.allocator_excess or (1.0 if is_cpu else allocator_excess()),
        message_excess=cluster.message_excess or 0.0,
        process_bytes=(cluster.process_gb or (_CPU_PROCESS if is_cpu else 0.0)) * 1e9,
        notes=notes,
    )


def _measured_attention(cluster: Cluster) -> dict[str, float]:
    """A cluster's measured FLOP/s of attention by kernel and direction, checked."""
    kernels = (*FUSED, FLASH3)
    known = {f"{kernel} {direction}" for kernel in kernels for direction in (FORWARD, BACKWARD)}
    for name, rate in cluster.attention_tflops.items():
        key = f"cluster.attention_tflops.{name}"
        if name not in known:
            cure = f"try 'flash {FORWARD}'; there are {', '.join(kernels)}"
            raise ConfigError(key, rate, "is not a kernel and a direction", cure)
        if not 0 < rate < math.inf:
            raise ConfigError(key, rate, "must be a positive number", "try 300")
    return {name: rate * 1e12 for name, rate in cluster.attention_tflops.items()}


def _device_of(cluster: Cluster) -> hardware.Device:
    """The cluster's device: from the table; or a measured device, whose peak is the rate of its products; or a CPU.

    A CPU that was not measured counts as a fast core: 3 GHz with two fused multiply-adds of sixteen float32 numbers in
    a cycle, 20 GB/s of memory, and gloo over loopback with 4 GB/s.
    """
    measured = cluster.peak_tflops
    if cluster.accelerator == "cpu":
        rates = {"float32": 3 * 2 * 16 * 2 / 1000 if measured is None else measured}
        return hardware.Device("CPU", "", "", None, 20.0, 4.0, rates, rates)
    if cluster.device is None:
        raise ConfigError("cluster.device", None, "an estimate needs a device", "try cluster=h100, or cluster=cpu")
    device = hardware.find_device(cluster.device)
    if device is not None:
        return device
    if measured is not None and cluster.memory_gb_per_second is not None:
        return hardware.Device(cluster.device, "", "", None, None, None, {"bfloat16": measured}, {"bfloat16": measured})
    known = ", ".join(other.name for other in hardware.DEVICES)
    raise ConfigError("cluster.device", cluster.device, "nothing is known of its speed", f"known are {known}")

"""The communication of one block and of the edges of a stage on one rank, as seconds on a machine.

The bytes are those of `titanlab.costs.traffic_account`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from titanlab.costs.layout import Layout
from titanlab.costs.traffic_account import (
    Coordinate,
    Step,
    Traffic,
    TrafficRow,
    add_context,
    add_exchange,
    add_sharding,
    add_tensor,
    parameter_elements,
    sum_whole_gradients,
)
from titanlab.plan.machine import AxisPlacement, Machine, axis_of

_FIRST = Coordinate()


class ShardingTraffic(NamedTuple):
    """FSDP2's communication for some units of one rank, each once.

    Attributes:
        gather, scatter, replicas: seconds of all-gathers, of reduce-scatters, and of HSDP's all-reduces.
        gathered_bytes, scattered_bytes: of the whole tensors, which are copied on the device.
        elements: of parameters that the units have on all ranks that share them.
    """

    gather: float
    scatter: float
    replicas: float
    gathered_bytes: int
    scattered_bytes: int
    elements: int


def seconds_of(rows: Iterable[TrafficRow], axis: AxisPlacement, machine: Machine) -> float:
    """Time of collectives and messages of one axis."""
    total = 0.0
    for row in rows:
        if row.kind == "recv":
            continue  # the time of a message is counted where it is sent
        hops = {"send": 1, "all_reduce": 2 * (axis.ranks - 1)}.get(row.kind)
        total += machine.collective_seconds(axis, row.wire_bytes, count=row.count, hops=hops)
    return total


def sharding_of(step: Step, pieces: tuple[str, ...], machine: Machine) -> ShardingTraffic:
    """FSDP2's communication for some pieces that are one stage."""
    traffic = Traffic()
    add_sharding(step, _FIRST, 0, pieces, traffic)
    rows = traffic.rows()
    layout = step.layout
    experts = expert_axis(layout, "expert_shard", machine.per_node)
    fsdp, replicate = (axis_of(layout, name, per_node=machine.per_node) for name in ("fsdp", "replicate"))
    gathers = [row for row in rows if row.kind == "all_gather"]
    sums = [row for row in rows if row.kind == "all_reduce"]
    scatters = [row for row in rows if row.kind not in ("all_gather", "all_reduce")]
    return ShardingTraffic(
        gather=_by_axis(gathers, fsdp, experts, machine),
        scatter=_by_axis(scatters, fsdp, experts, machine),
        replicas=seconds_of(sums, replicate, machine),
        gathered_bytes=sum(row.bytes for row in gathers),
        scattered_bytes=sum(row.bytes for row in scatters),
        elements=parameter_elements(step, _FIRST, pieces),
    )


def _by_axis(rows: Iterable[TrafficRow], fsdp: AxisPlacement, experts: AxisPlacement, machine: Machine) -> float:
    """Time of the collectives of FSDP2, some of which have the ranks that share a part of the experts."""
    rows = list(rows)
    own = [row for row in rows if row.axis == "expert_shard"]
    return seconds_of(own, experts, machine) + seconds_of([row for row in rows if row not in own], fsdp, machine)


def expert_axis(layout: Layout, name: str, per_node: int) -> AxisPlacement:
    """The ranks that share experts, `expert`, which are neighbours; or those that share a part, `expert_shard`."""
    ranks, inner = (layout.expert, 1) if name == "expert" else (max(1, layout.expert_shard), layout.expert)
    in_node = max(1, min(ranks, per_node // inner))
    return AxisPlacement(ranks=ranks, in_node=in_node, nodes=-(-ranks // in_node))


def exchange_rows(step: Step, piece: str) -> list[TrafficRow]:
    """Communication of expert parallelism in the forward pass of one block for one microbatch."""
    traffic = Traffic()
    add_exchange(step, (piece,), traffic, only_forward=True)
    return traffic.rows()


def tensor_rows(step: Step, piece: str) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """Communication of tensor parallelism in one piece: for each microbatch, and for each step."""
    traffic = Traffic()
    add_tensor(step, (piece,), traffic)
    once = Traffic()
    sum_whole_gradients(step, _FIRST, (piece,), once)
    return traffic.rows(), once.rows()


def context_rows(step: Step, piece: str) -> list[TrafficRow]:
    """Communication of context parallelism in one block for one microbatch."""
    traffic = Traffic()
    add_context(step, _FIRST, (piece,), traffic)
    return traffic.rows()


@functools.lru_cache(maxsize=4096)
def axis_in(layout: Layout, name: str, per_node: int) -> AxisPlacement:
    """See `axis_of`."""
    return axis_of(layout, name, per_node=per_node)

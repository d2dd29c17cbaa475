"""The resources of a job, derived from its layout: nodes, processes and devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from titanlab.cluster.schema import Cluster
from titanlab.costs.layout import Layout
from titanlab.distributed.host import cores
from titanlab.errors import ConfigError
from titanlab.recipe.launch_contract import LaunchSettings


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The resources of a job; jobs of one shape are submitted together.

    Attributes:
        processes: of the run, its world size.
        nodes, tasks_per_node: their product is `processes`.
        cpus_per_task: cores of one process; None: the site's default.
        gpus_per_node: devices of one node; 0 on CPU.
        memory_gib: host memory of one node; None: the site's default.
        minutes: time limit of the job; None: the site's default, or no limit.
    """

    processes: int
    nodes: int = 1
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    memory_gib: float | None = None
    minutes: int | None = None

    @property
    def gpu_hours(self) -> float | None:
        """Devices times the hours of the time limit; None without a time limit."""
        return None if self.minutes is None else self.gpus_per_node * self.nodes * self.minutes / 60

    def to_mapping(self) -> dict[str, Any]:
        """Plain values by the names of the fields."""
        return asdict(self)


class Placed(Protocol):
    """The part of a resolved recipe from which a shape is derived."""

    world: int | None
    cluster: Cluster
    launch: LaunchSettings

    @property
    def layout(self) -> Layout:
        """The parallel degrees."""


def shape_from(mapping: Mapping[str, Any]) -> Shape:
    """The shape that `to_mapping` wrote."""
    known = Shape.__dataclass_fields__
    return Shape(**{key: value for key, value in mapping.items() if key in known})


def shape_of(recipe: Placed) -> Shape:
    """The shape of a resolved recipe's job.

    Raises:
        ConfigError: the cluster does not describe its nodes, or is too small.
    """
    world, cluster, launch = recipe.world, recipe.cluster, recipe.launch
    assert world is not None, "a resolved recipe has its world"
    on_gpus = cluster.accelerator == "cuda"
    if launch.runs_here:
        return Shape(processes=world, tasks_per_node=world, gpus_per_node=world if on_gpus else 0)
    check_cluster(cluster, launch)
    assert cluster.per_node is not None
    nodes = _nodes(world, cluster.per_node, cluster.nodes, together=recipe.layout.tensor)
    tasks = world // nodes
    return Shape(
        processes=world,
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_task=launch.cpus_per_task,
        gpus_per_node=tasks if on_gpus else 0,
        memory_gib=launch.memory_gib,
        minutes=launch.minutes,
    )


def check_cluster(cluster: Cluster, launch: LaunchSettings) -> None:
    """Check that a cluster describes its nodes: jobs run there, and this host's devices say nothing about them.

    Call it before a recipe is resolved: that replaces `auto` by values of this host.

    Raises:
        ConfigError: the accelerator or the size of a node is left to be detected.
    """
    if launch.runs_here:
        return
    cure = "name the nodes: cluster=h100, cluster=cpu or one of your own (docs/clusters.md)"
    if cluster.accelerator == "auto" or (cluster.accelerator == "cuda" and cluster.device is None):
        key = "accelerator" if cluster.accelerator == "auto" else "device"
        rule = f"is whatever this host has, and launch={launch.kind} runs elsewhere"
        raise ConfigError(f"cluster.{key}", getattr(cluster, key), rule, cure)
    if cluster.accelerator == "cuda" and cluster.device == "cpu":
        rule = "is what the recipe asks for, and the nodes of this cluster have none"
        cure = "name nodes with GPUs, such as cluster=h100, or try a recipe for CPUs"
        raise ConfigError("cluster.accelerator", "cuda", rule, cure)
    if cluster.per_node is None:
        rule = f"launch={launch.kind} derives the nodes of a job from it"
        raise ConfigError("cluster.per_node", None, rule, cure)


def local_processes(at_once: int | None) -> int:
    """Processes that a sweep may run on this host at once: `at_once`, or one per core."""
    return at_once if at_once is not None else cores()


def _nodes(world: int, per_node: int, nodes: int | None, *, together: int) -> int:
    """The smallest number of equally filled nodes; if possible, groups of `together` ranks stay on one node."""
    least = math.ceil(world / per_node)
    if nodes is not None and least > nodes:
        rule = f"is more than the cluster's {nodes} nodes of {per_node}"
        raise ConfigError("world", world, rule, f"try world={nodes * per_node}, or another cluster")
    most = world if nodes is None else min(nodes, world)
    even = [count for count in range(least, most + 1) if world % count == 0]
    if not even:
        fits = max(size for size in range(1, world) if _fills(size, per_node, most))
        rule = f"does not fill nodes of {per_node} evenly, of which the cluster has {nodes}"
        raise ConfigError("world", world, rule, f"try world={fits}")
    return next((count for count in even if world // count % together == 0), even[0])


def _fills(world: int, per_node: int, nodes: int) -> bool:
    return any(world % count == 0 and world // count <= per_node for count in range(1, nodes + 1))

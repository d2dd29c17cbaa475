"""Config of a cluster: the facts that do not depend on who starts a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.options import option

ACCELERATORS = ("auto", "cpu", "cuda")


@option("cluster")
@dataclass(kw_only=True)
class Cluster:
    """The machines of a run.

    Attributes:
        accelerator: `cpu`, `cuda`, or `auto`: CUDA where this host shows a GPU. `auto` is replaced
            by what was found before a run gets its name.
        device: name of the accelerator as its driver prints it, or `cpu`; null: this host's.
        per_node: processes of a run on one node, one a device; null: not known.
        nodes: how many there are; null: not known.
        linked_nodes: number of neighbouring nodes whose devices the link connects; 18 in a rack of 72 GB200.
        memory_gb: of one device, as its datasheet counts; null: not known.
        link_gb_per_second: between the devices of a node, one direction; null: not known.
        network_gb_per_second: of one device's share of the network between nodes, one direction; null: not known.
        peak_tflops: dense peak of one device in the precision of the matrix products, for the MFU;
            null: from the device's datasheet, where it is known.
        memory_gb_per_second: bandwidth of the memory of one device, for the planner; null: from the datasheet.
        allocator_excess: bytes that the allocator reserves for each byte of tensors; null: as in published runs, and 1
            on CPUs.
        message_excess: bytes that a process keeps for each byte that it exchanges with others in a microbatch; null: 0.
        process_gb: memory of a process without tensors, where its memory is the device's; null: none on GPUs, and on
            CPUs that of a process that has imported torch.
        efficiencies: of the planner's model of time, by name, where they differ from those that were fitted to
            published runs; see `titanlab.plan.machine`.
    """

    accelerator: str = "auto"
    device: str | None = None
    per_node: int | None = field(default=None, metadata={"identity": False})
    nodes: int | None = field(default=None, metadata={"identity": False})
    linked_nodes: int = field(default=1, metadata={"identity": False})
    memory_gb: float | None = field(default=None, metadata={"identity": False})
    link_gb_per_second: float | None = field(default=None, metadata={"identity": False})
    network_gb_per_second: float | None = field(default=None, metadata={"identity": False})
    peak_tflops: float | None = field(default=None, metadata={"identity": False})
    memory_gb_per_second: float | None = field(default=None, metadata={"identity": False})
    allocator_excess: float | None = field(default=None, metadata={"identity": False})
    message_excess: float | None = field(default=None, metadata={"identity": False})
    process_gb: float | None = field(default=None, metadata={"identity": False})
    efficiencies: dict[str, float] = field(default_factory=dict, metadata={"identity": False})

    def __post_init__(self) -> None:
        if self.accelerator not in ACCELERATORS:
            raise ConfigError(
                "cluster.accelerator", self.accelerator, "is no accelerator", f"try {', '.join(ACCELERATORS)}"
            )
        for name in ("per_node", "nodes"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"cluster.{name}", count, "must be at least 1", "try 8, or null")
        if self.linked_nodes < 1:
            raise ConfigError("cluster.linked_nodes", self.linked_nodes, "must be at least 1", "try 1")
        examples = {
            "memory_gb": 80,
            "link_gb_per_second": 450,
            "network_gb_per_second": 50,
            "peak_tflops": 989,
            "memory_gb_per_second": 3350,
            "allocator_excess": 1.2,
            "message_excess": 1.5,
            "process_gb": 0.5,
        }
        for name, example in examples.items():
            figure = getattr(self, name)
            if figure is not None and not 0 < figure < math.inf:
                raise ConfigError(f"cluster.{name}", figure, "must be a positive number", f"try {example}, or null")

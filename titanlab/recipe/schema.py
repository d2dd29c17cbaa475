"""The configs `Training` and `Cluster`, and the part of a launcher's config that a recipe reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from titanlab.costs import AUTO, Setting
from titanlab.options import NOT_PRICED, OUTSIDE_STEP, option

# Metadata of a field that changes neither the numbers of a run nor the time of its steps.
NEITHER = {"identity": False, **OUTSIDE_STEP}


@option("training")
@dataclass(frozen=True, kw_only=True)
class Training:
    """The training loop.

    Attributes:
        steps: optimizer steps in all.
        seq_len: tokens in a sequence.
        global_batch: sequences in one optimizer step, over all processes.
        microbatch: sequences in one forward pass of one process; null: all sequences that the process has in a
            step. With a smaller number, gradients are accumulated.
        loss_chunk: the head and the loss are computed in chunks of this many tokens, so that the logits of a microbatch
            never exist whole; 0 or null: they do. -1: chunks only if a process's logits of a microbatch exceed 1 GiB in
            float32: the largest power of two whose logits are at most 512 MiB.
        freeze: parameters that are not trained, by steps of their paths, such as `tok_embeddings`, `layers.0` or
            `attention.w*`.
        max_grad_norm: gradients are scaled down to this norm; null: never.
        deterministic: use only algorithms that give the same bits every time.
        validate_every: steps between validations; 0: never.
        validation_sequences: held-out sequences of one validation.
        log_every: steps in one row of metrics.
        unmeasured_steps: number of first steps that the throughput leaves out.
        gc_every: steps between garbage collections; automatic collection is off.
        compare_ranks_every: steps between comparisons of the ranks' time and memory; 0: only after the last step.
        check_every: steps between checks for silent data corruption: forward and backward run twice, and the gradients
            must have the same bits; 0: never.
        on_nan: what follows a step whose loss or gradient is not finite: `stop` ends the run as `nan`; `skip` leaves
            parameters and optimizer as they are and goes on; `rollback` goes back to the newest checkpoint, and leaves
            the data since then out.
        nan_limit: for skip, bad steps in a row; for rollback, rollbacks of an attempt. One more ends the run.
        step_timeout_seconds: a step that takes longer ends the run as `hang`; 0: no limit; null: the larger of 60 s and
            10 times the median step, once three steps after the first are known, and first_step_timeout_seconds before.
        first_step_timeout_seconds: the limit for the start, the first step with its compilation, validation and
            checkpoints; null: no limit.
    """

    steps: int = field(default=1000, metadata={"least": 1, **OUTSIDE_STEP})
    seq_len: int = field(default=512, metadata={"least": 1})
    global_batch: int = field(default=8, metadata={"least": 1})
    microbatch: int | None = field(default=None, metadata={"least": 1, "cure": "try 1, or null for all"})
    loss_chunk: int | None = field(
        default=AUTO,
        metadata={"before": 0, "least": AUTO, "cure": "try 1024, 0 for whole logits, or -1 to choose by their size"},
    )
    freeze: tuple[str, ...] = field(default=(), metadata={"before": ()})
    max_grad_norm: float | None = field(default=1.0, metadata={"positive": True, "cure": "try 1.0, or null"})
    deterministic: bool = field(default=False, metadata=NOT_PRICED)
    validate_every: int = field(default=0, metadata={**NEITHER, "least": 0})
    validation_sequences: int = field(default=32, metadata={**NEITHER, "least": 1})
    log_every: int = field(default=10, metadata={**NEITHER, "least": 1})
    unmeasured_steps: int = field(default=3, metadata={**NEITHER, "least": 0})
    gc_every: int = field(default=100, metadata={**NEITHER, "least": 1})
    compare_ranks_every: int = field(default=50, metadata={**NEITHER, "least": 0})
    check_every: int = field(default=0, metadata={"identity": False, **NOT_PRICED, "least": 0})
    on_nan: str = field(default="stop", metadata={**NEITHER, "choices": ("stop", "skip", "rollback")})
    nan_limit: int = field(default=3, metadata={**NEITHER, "least": 0})
    step_timeout_seconds: float | None = field(
        default=None, metadata={**NEITHER, "least": 0, "cure": "try 600, 0 for no limit, or null"}
    )
    first_step_timeout_seconds: float | None = field(
        default=3600.0, metadata={**NEITHER, "positive": True, "cure": "try 600, or null for no limit"}
    )

    def __post_init__(self) -> None:
        if self.loss_chunk is None:
            object.__setattr__(self, "loss_chunk", 0)


def _fact(example: float) -> Any:
    """A field for a fact of the machines, a positive number or null; it is not part of a run's identity."""
    return field(default=None, metadata={"identity": False, "positive": True, "cure": f"try {example}, or null"})


@option("cluster")
@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines of a run.

    Attributes:
        accelerator: `cpu`, `cuda`, or `auto`: CUDA if this host shows a GPU. `auto` is replaced by the accelerator
            before a run gets its name.
        device: name of the accelerator as its driver prints it, or `cpu`; null: this host's.
        per_node: processes of a run on one node, one a device; null: not known.
        nodes: number of nodes; null: not known.
        linked_nodes: number of neighbouring nodes whose devices the link connects; 18 in a rack of 72 GB200.
        memory_gb: of one device, as its datasheet counts; null: not known.
        link_gb_per_second: between the devices of a node, one direction; null: not known.
        network_gb_per_second: of one device's share of the network between nodes, one direction; null: not known.
        peak_tflops: dense peak of one device in the precision of the matrix products, for the MFU;
            null: from the device's datasheet, where it is known.
        memory_gb_per_second: bandwidth of the memory of one device, for the planner; null: from the datasheet.
        attention_tflops: measured rates of attention by kernel and direction, such as `flash backward`; those that are
            not here: from the table of kernels.
        allocator_excess: bytes that the allocator reserves for each byte of tensors; null: as in published runs, and 1
            on CPUs.
        message_excess: bytes that a process keeps for each byte that it exchanges with others in a microbatch; null: 0.
        process_gb: memory of a process without tensors, if the device's memory is the host's; null: 0 on GPUs, on CPUs
            the memory of a process that has imported torch.
        efficiencies: of the planner's model of time, by name, if they differ from the values that were fitted to
            published runs; see `titanlab.plan.machine`.
    """

    accelerator: str = field(default="auto", metadata={"choices": ("auto", "cpu", "cuda")})
    device: str | None = None
    per_node: int | None = field(default=None, metadata={"identity": False, "least": 1, "cure": "try 8, or null"})
    nodes: int | None = field(default=None, metadata={**NEITHER, "least": 1, "cure": "try 8, or null"})
    linked_nodes: int = field(default=1, metadata={"identity": False, "least": 1})
    memory_gb: float | None = _fact(80)
    link_gb_per_second: float | None = _fact(450)
    network_gb_per_second: float | None = _fact(50)
    peak_tflops: float | None = _fact(989)
    memory_gb_per_second: float | None = _fact(3350)
    attention_tflops: dict[str, float] = field(default_factory=dict, metadata={"identity": False})
    allocator_excess: float | None = _fact(1.2)
    message_excess: float | None = _fact(1.5)
    process_gb: float | None = _fact(0.5)
    efficiencies: dict[str, float] = field(default_factory=dict, metadata={"identity": False})


class LaunchSettings(Protocol):
    """The part of a `titanlab.launch.contract.LaunchConfig` that a recipe reads.

    `LaunchConfig` documents the fields. It is in a package above this one, because its methods are about jobs.
    """

    kind: str
    threads: int | None = None
    cpus_per_task: int | None = None
    memory_gib: float | None = None
    minutes: int | None = None
    signal_seconds: int = 0
    requeue: bool = False
    max_requeues: int = 0
    restarts: int = 0
    min_world: int | None = None

    @property
    def runs_here(self) -> bool:
        """Whether jobs run on this host: then the cluster's devices and memory are this host's."""
        return False

    @property
    def starts_directly(self) -> bool:
        """Whether `titanlab train` starts the ranks itself and waits for them, without a queue."""
        return False

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this launcher.

        Raises:
            ConfigError: the rest of the recipe does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

"""Config of the training loop: steps, batch, validation, timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.costs.setting import AUTO
from titanlab.errors import ConfigError
from titanlab.options import option

ON_NAN = ("stop", "skip", "rollback")


@option("training")
@dataclass(kw_only=True)
class Training:
    """The training loop.

    Attributes:
        steps: optimizer steps in all.
        seq_len: tokens in a sequence.
        global_batch: sequences in one optimizer step, over all processes.
        microbatch: sequences in one forward pass of one process; null: all sequences that the process has in a
            step. With a smaller number, gradients are accumulated.
        loss_chunk: the head and the loss are computed in chunks of this many tokens, so that the logits of a microbatch
            never exist whole; 0 or null: they do. -1: in chunks where a process's logits of a microbatch are more
            than 1 GiB in float32, and then the largest power of two whose logits are at most 512 MiB.
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
        step_timeout_seconds: a step that takes longer ends the run as `hang`; 0: no limit; null: the larger of 60 and
            10 times the median step, once three steps after the first are known, and first_step_timeout_seconds before.
        first_step_timeout_seconds: the limit for the start, the first step with its compilation, validation and
            checkpoints; null: no limit.
    """

    steps: int = 1000
    seq_len: int = 512
    global_batch: int = 8
    microbatch: int | None = None
    loss_chunk: int | None = field(default=AUTO, metadata={"before": 0})
    max_grad_norm: float | None = 1.0
    deterministic: bool = False
    validate_every: int = field(default=0, metadata={"identity": False})
    validation_sequences: int = field(default=32, metadata={"identity": False})
    log_every: int = field(default=10, metadata={"identity": False})
    unmeasured_steps: int = field(default=3, metadata={"identity": False})
    gc_every: int = field(default=100, metadata={"identity": False})
    compare_ranks_every: int = field(default=50, metadata={"identity": False})
    check_every: int = field(default=0, metadata={"identity": False})
    on_nan: str = field(default="stop", metadata={"identity": False})
    nan_limit: int = field(default=3, metadata={"identity": False})
    step_timeout_seconds: float | None = field(default=None, metadata={"identity": False})
    first_step_timeout_seconds: float | None = field(default=3600.0, metadata={"identity": False})

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "global_batch", "validation_sequences", "log_every", "gc_every"):
            value = getattr(self, name)
            if value < 1:
                usual = type(self).__dataclass_fields__[name].default
                raise ConfigError(f"training.{name}", value, "must be at least 1", f"try {usual}")
        if self.on_nan not in ON_NAN:
            raise ConfigError("training.on_nan", self.on_nan, f"is none of {', '.join(ON_NAN)}", "try stop")
        for name in ("validate_every", "unmeasured_steps", "nan_limit", "check_every", "compare_ranks_every"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"training.{name}", value, "must not be negative", "try 0")
        if self.step_timeout_seconds is not None and not self.step_timeout_seconds >= 0:
            rule, cure = "must not be negative", "try 600, 0 for no limit, or null"
            raise ConfigError("training.step_timeout_seconds", self.step_timeout_seconds, rule, cure)
        if self.first_step_timeout_seconds is not None and not self.first_step_timeout_seconds > 0:
            rule, cure = "must be positive", "try 600, or null for no limit"
            raise ConfigError("training.first_step_timeout_seconds", self.first_step_timeout_seconds, rule, cure)
        if self.microbatch is not None and self.microbatch < 1:
            raise ConfigError("training.microbatch", self.microbatch, "must be at least 1", "try 1, or null for all")
        if self.loss_chunk is None:
            self.loss_chunk = 0
        if self.loss_chunk < AUTO:
            cure = "try 1024, 0 for whole logits, or -1 to choose by their size"
            raise ConfigError("training.loss_chunk", self.loss_chunk, "is a number of tokens", cure)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError("training.max_grad_norm", self.max_grad_norm, "must be positive", "try 1.0, or null")

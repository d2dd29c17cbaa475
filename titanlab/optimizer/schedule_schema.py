"""Config of the learning-rate schedule, which every optimizer has."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError

# Default of `warmup_steps` in a run that has at least as many steps.
WARMUP_STEPS = 200
DECAYS = ("linear", "cosine", "sqrt")


@dataclass(kw_only=True)
class Schedule:
    """Warm-up, then a constant rate, then decay.

    Attributes:
        warmup_steps: steps in which the rate rises linearly from 0; null: 200, or a tenth of a run with fewer steps.
        decay_fraction: share of all steps, at the end, in which the rate falls; 0: it does not fall.
        decay: form of the decay: `linear`, `cosine`, or `sqrt` (1 − √progress, arXiv 2405.18392).
        floor: the rate at the last step, as a share of the peak.
    """

    warmup_steps: int | None = None
    decay_fraction: float = 0.8
    decay: str = "cosine"
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError("optimizer.schedule.warmup_steps", self.warmup_steps, "must not be negative", "try 0")
        for name in ("decay_fraction", "floor"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"optimizer.schedule.{name}", value, "must lie between 0 and 1", "try 0.1")
        if self.decay not in DECAYS:
            raise ConfigError("optimizer.schedule.decay", self.decay, "is no decay", f"try {', '.join(DECAYS)}")

    def warmup(self, steps: int) -> int:
        """Number of warm-up steps in a run of `steps` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return WARMUP_STEPS if steps >= WARMUP_STEPS else max(1, steps // 10)

"""Config of optimizer=adamw, and the fields of all optimizers with Adam's averages."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field, replace

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.optimizer.contract import STEP_BYTES, OptimizerConfig, OptimizerFactory, Scheduled, Stored
from titanlab.options import option

ROUNDINGS = ("auto", "nearest", "stochastic")


@dataclass(kw_only=True)
class Averaged(Scheduled):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Attributes:
        lr: peak learning rate.
        betas: decay of the averages of gradient and squared gradient; by default as the Llama models were trained
            (arXiv 2302.13971, section 2.3).
        eps: added to the denominator.
        weight_decay: of parameters with two or more dimensions; norms and biases do not decay. The default is theirs.
    """

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("optimizer.betas", self.betas, "must be two numbers in [0, 1)", "try [0.9,0.95]")
        if not 0 < self.eps < math.inf:
            raise ConfigError("optimizer.eps", self.eps, "must be positive and finite", "try 1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("optimizer.weight_decay", self.weight_decay, "must be finite and not negative", "try 0.1")

    def reduced(self, *, least_eps: float) -> OptimizerConfig:
        """With at least this `eps`."""
        return replace(self, eps=max(self.eps, least_eps))

    def state_bytes(self, parameter: Stored) -> int:
        """Two averages in the dtype of the parameter."""
        return 2 * parameter.part_bytes + STEP_BYTES


@dataclass(kw_only=True)
class Rounded(Averaged):
    """AdamW with a choice of the rounding to bfloat16.

    Attributes:
        rounding: `nearest`, which loses an update below 1/256 of its parameter; `stochastic`, up or down with the
            probability that keeps the mean (arXiv 2010.06192); `auto`: stochastic if parameters are stored in bfloat16.
    """

    rounding: str = field(default="auto", metadata={"before": "auto"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ConfigError("optimizer.rounding", self.rounding, "no such choice", f"try {', '.join(ROUNDINGS)}")

    def check(self, setting: Setting) -> None:
        """Check that stochastic rounding is possible, also where `auto` chooses it.

        Raises:
            ConfigError: parameters are not stored in bfloat16, or torchao is not installed.
        """
        in_bf16 = setting.rests_in == "bfloat16"
        if self.rounding == "stochastic" and not in_bf16:
            raise ConfigError(
                "optimizer.rounding",
                self.rounding,
                f"rounds parameters that rest in bfloat16, and with precision={setting.kinds['precision']} they do not",
                "try auto, or precision=bf16_full",
            )
        if self.rounding != "nearest" and in_bf16:
            needs_torchao("optimizer.rounding", self.rounding, cure="try nearest")


@option("optimizer", "adamw")
@dataclass(kw_only=True)
class AdamW(Rounded):
    """torch's AdamW, fused."""

    kind: str = "adamw"

    def implementation(self) -> OptimizerFactory:
        """Torch's optimizer, or torchao's arithmetic."""
        from titanlab.optimizer.adamw import AdamWFactory

        return AdamWFactory(self)


def needs_torchao(key: str, value: object, *, cure: str) -> None:
    """Check that torchao is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(key, value, "needs the package torchao, which is not installed", f"{cure}, or install it")

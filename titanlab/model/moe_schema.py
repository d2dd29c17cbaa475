"""The fields and rules that configs of models with experts share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlab.costs.account import RoutedExperts
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig

BALANCES = ("bias", "auxiliary_batch", "auxiliary_sequence", "none")


@dataclass(kw_only=True)
class ExpertFields(ModelConfig):
    """The fields of models whose feed-forwards are experts.

    Attributes:
        experts: of each block; ffn_dim is the width of one.
        active_experts: that compute each token.
        balance: how the load of experts is balanced. `bias` adds a bias to the probabilities for the choice of experts
            only; after each step it grows for experts with fewer tokens than the mean, and shrinks for the others
            (arXiv 2408.15664). `auxiliary_batch` adds a loss with the shares of tokens in the step before, over all
            ranks; `auxiliary_sequence` one with the shares in each sequence (arXiv 2101.03961, 2412.19437).
        bias_rate: how much a bias changes in a step.
        auxiliary_weight: of the auxiliary loss of each block.
    """

    experts: int
    active_experts: int
    balance: str = "bias"
    bias_rate: float = 1e-3
    auxiliary_weight: float = 1e-3

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts(
            count=self.experts,
            active=self.active_experts,
            balance=self.balance,
            bias_rate=self.bias_rate,
            auxiliary_weight=self.auxiliary_weight,
        )

    def check(self, setting: Setting) -> None:
        """Check that each rank has whole sequences if their shares are counted.

        Raises:
            ConfigError: it has parts of sequences.
        """
        super().check(setting)
        if self.balance == "auxiliary_sequence" and setting.layout.context > 1:
            rule = f"counts by sequence, of which context={setting.layout.context} gives each process a part"
            raise ConfigError("model.balance", self.balance, rule, "try auxiliary_batch or bias")
        if self.balance == "auxiliary_sequence" and setting.layout.expert > 1 and setting.layout.tensor > 1:
            rule = "counts by sequence, and with tensor > 1 and expert > 1 each process routes a part of the tokens"
            raise ConfigError("model.balance", self.balance, rule, "try auxiliary_batch or bias")

    def check_routing(self) -> None:
        """Check the fields above.

        Raises:
            ConfigError: one breaks a rule.
        """
        check_experts(self.experts, self.active_experts)
        if self.balance not in BALANCES:
            raise ConfigError("model.balance", self.balance, "no such balance", f"choose one of {', '.join(BALANCES)}")
        for name, cure in (("bias_rate", "try 0.001"), ("auxiliary_weight", "try 0.001")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"model.{name}", value, "must be finite and at least 0", cure)


def check_experts(count: int, active: int) -> None:
    """Check the numbers of experts.

    Raises:
        ConfigError: there are fewer than two, or a token would have fewer than two or more than there are.
    """
    if count < 2:
        rule = "must be at least 2: one expert is a dense feed-forward"
        raise ConfigError("model.experts", count, rule, "try 8, or a dense model")
    if active < 2:
        rule = "must be at least 2: the weight of a single expert is always 1, so that its router would learn nothing"
        raise ConfigError("model.active_experts", active, rule, "try 2")
    if active > count:
        rule = f"is more than the {count} experts"
        raise ConfigError("model.active_experts", active, rule, f"try {count}")

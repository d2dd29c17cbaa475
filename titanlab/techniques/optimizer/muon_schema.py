"""Config of optimizer=muon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from titanlab.costs.account import is_in_block
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.optimizer.adamw_schema import Averaged
from titanlab.techniques.optimizer.contract import OptimizerFactory, Stored

ADJUSTMENTS = ("match_rms_adamw", "original")


@option("optimizer", "muon")
@dataclass(frozen=True, kw_only=True)
class Muon(Averaged):
    """Muon for the matrices of blocks, AdamW for all else (K. Jordan et al., 2024; at scale: arXiv 2502.16982).

    `betas` and `eps` are AdamW's; the other fields apply to both.

    Attributes:
        momentum: decay of the average of gradients that is orthogonalised.
        nesterov: mix the current gradient into that average once more.
        newton_schulz_steps: iterations of the orthogonalisation.
        adjust_lr: `match_rms_adamw` scales an update to the size of AdamW's, so that AdamW's learning rates fit
            (0.2·√(larger side)); `original` scales it by √(rows / columns) if there are more rows than columns.
    """

    kind: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    adjust_lr: str = "match_rms_adamw"

    # Matrices are made orthogonal in bf16: 3.6e-4 of a parameter is measured after three steps.
    tolerances: ClassVar[Mapping[str, float]] = {"parameter": 3e-3, "loss": 1e-4, "grad_norm": 1e-3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError("optimizer.momentum", self.momentum, "must lie in [0, 1)", "try 0.95")
        if not 1 <= self.newton_schulz_steps < 100:
            raise ConfigError("optimizer.newton_schulz_steps", self.newton_schulz_steps, "must lie in 1 to 99", "try 5")
        if self.adjust_lr not in ADJUSTMENTS:
            known = ", ".join(ADJUSTMENTS)
            raise ConfigError("optimizer.adjust_lr", self.adjust_lr, "no such choice", f"choose one of {known}")

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.model.experts is not None:
            rule = "orthogonalises single matrices, and the model's experts are stacks of matrices"
            raise ConfigError("optimizer", self.kind, rule, "try optimizer=adamw")

    def applies_to(self, name: str, dims: int) -> bool:
        """Whether Muon updates a parameter; AdamW updates the others."""
        return is_in_block(name) and dims == 2

    def state_bytes(self, parameter: Stored) -> int:
        if self.applies_to(parameter.name, len(parameter.shape)):
            return parameter.part_bytes
        return super().state_bytes(parameter)

    def implementation(self) -> OptimizerFactory:
        from titanlab.techniques.optimizer.muon import MuonFactory

        return MuonFactory(self)

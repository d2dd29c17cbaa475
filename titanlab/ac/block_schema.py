"""Configs of ac=none, ac=full and ac=selective_layer: blocks are recomputed as a whole, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.ac.contract import ACConfig
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option


@option("ac", "none")
@dataclass(kw_only=True)
class NoCheckpointing(ACConfig):
    """Everything that the backward pass needs is kept."""

    kind: str = "none"


@option("ac", "full")
@dataclass(kw_only=True)
class FullCheckpointing(ACConfig):
    """Every block keeps its input only; its forward is computed again in the backward (arXiv 1604.06174)."""

    kind: str = "full"

    def recomputes(self, number: int) -> bool:
        """Every block."""
        return True


@option("ac", "selective_layer")
@dataclass(kw_only=True)
class SelectiveLayer(ACConfig):
    """Every n-th block is computed again and the others keep everything, or the other way round.

    Attributes:
        every: n: blocks 0, n, 2n, … counted in the whole model, however it is cut into stages of a pipeline.
        keep: these keep everything, and the others are computed again.
    """

    kind: str = "selective_layer"
    every: int = 2
    keep: bool = field(default=False, metadata={"before": False})

    def __post_init__(self) -> None:
        if self.every < 1:
            cure = f"try 2 for every second block, or ac={self._for_none} for none"
            raise ConfigError("ac.every", self.every, "must be at least 1", cure)

    def check(self, setting: Setting) -> None:
        """Check that the model has as many blocks.

        Raises:
            ConfigError: it has fewer.
        """
        layers = setting.model.layers
        if self.every > layers:
            rule = f"is more than the model's {layers} blocks"
            raise ConfigError("ac.every", self.every, rule, f"try {max(1, layers // 2)}, or ac={self._for_none}")

    def recomputes(self, number: int) -> bool:
        """Every n-th block, or with `keep` all others."""
        return (number % self.every == 0) is not self.keep

    @property
    def _for_none(self) -> str:
        """The policy that does the same as this one when `every` chooses no block."""
        return "full" if self.keep else "none"

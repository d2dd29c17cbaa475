"""Configs of ac=none, ac=full and ac=selective_layer: a block is recomputed completely or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from titanlab.ac.contract import ACConfig
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option

# Blocks of the smallest reduced model.
_LEAST_BLOCKS = 2


@option("ac", "none")
@dataclass(kw_only=True)
class NoCheckpointing(ACConfig):
    """Blocks keep all activations that the backward pass needs."""

    kind: str = "none"

    def describe(self) -> str:
        """None."""
        return ""


@option("ac", "full")
@dataclass(kw_only=True)
class FullCheckpointing(ACConfig):
    """Every block keeps only its input and is recomputed in the backward pass (arXiv 1604.06174)."""

    kind: str = "full"

    def recomputes(self, number: int) -> bool:
        """Every block."""
        return True


@option("ac", "selective_layer")
@dataclass(kw_only=True)
class SelectiveLayer(ACConfig):
    """Every n-th block is recomputed and the others keep all activations, or the reverse.

    Attributes:
        every: n, for blocks 0, n, 2n, … counted in the full model, not in a pipeline stage.
        keep: the reverse: every n-th block keeps all activations, and the others are recomputed.
    """

    kind: str = "selective_layer"
    every: int = 2
    keep: bool = field(default=False, metadata={"before": False})

    def __post_init__(self) -> None:
        if self.every < 1:
            cure = f"try 2 for every second block, or ac={self._for_none} for none"
            raise ConfigError("ac.every", self.every, "must be at least 1", cure)

    def check(self, setting: Setting) -> None:
        """Check that the model has at least `every` blocks.

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

    def reduced(self, *, note: Callable[[str], None]) -> ACConfig:
        """See `ACConfig`."""
        if self.every <= _LEAST_BLOCKS:
            return self
        note(f"ac.every={self.every} is more than the blocks allow: {_LEAST_BLOCKS}")
        return replace(self, every=_LEAST_BLOCKS)

    @property
    def _for_none(self) -> str:
        """The policy that is the same as this one without any n-th block."""
        return "full" if self.keep else "none"

"""Config of ac=selective_layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option


@option("ac", "selective_layer")
@dataclass(kw_only=True)
class SelectiveLayer:
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
        layers = setting.model.layers
        if self.every > layers:
            rule = f"is more than the model's {layers} blocks"
            raise ConfigError("ac.every", self.every, rule, f"try {max(1, layers // 2)}, or ac={self._for_none}")

    def chooses(self, number: int) -> bool:
        """Whether block `number` of the whole model is computed again."""
        return (number % self.every == 0) is not self.keep

    @property
    def _for_none(self) -> str:
        """The policy that is this one with no block chosen."""
        return "full" if self.keep else "none"

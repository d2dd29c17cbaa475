"""What the configs of AdamW with states of few bits have in common."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.optimizer.adamw_schema import Rounded, needs_torchao


@dataclass(kw_only=True)
class LowBit(Rounded):
    """AdamW whose two averages of every matrix are kept in few bits, with one scale a block.

    Attributes:
        block_size: neighbours in a row that share a scale.
    """

    kind: str = ""
    block_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2 or self.block_size % 2:
            raise ConfigError("optimizer.block_size", self.block_size, "must be even and positive", "try 128 or 256")

    def check(self, setting: Setting) -> None:
        """Refuse what torchao is to do where it is not installed."""
        super().check(setting)
        needs_torchao("optimizer.kind", self.kind, cure="try optimizer=adamw")

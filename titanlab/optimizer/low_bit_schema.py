"""Configs of optimizer=adamw_8bit, adamw_4bit and adamw_fp8: AdamW whose averages have few bits."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs import hardware
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.optimizer.adamw_schema import Rounded, needs_torchao
from titanlab.optimizer.contract import OptimizerFactory
from titanlab.options import option

# Older GPUs cannot compile conversions to float8.
_FP8_CAPABILITY = (8, 9)


@dataclass(kw_only=True)
class LowBit(Rounded):
    """AdamW that stores the two averages of every matrix in few bits, with one scale per block.

    Attributes:
        block_size: number of neighbouring elements in a row that share a scale.
    """

    kind: str = ""
    block_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2 or self.block_size % 2:
            raise ConfigError("optimizer.block_size", self.block_size, "must be even and positive", "try 128 or 256")

    def check(self, setting: Setting) -> None:
        """Check that torchao is installed.

        Raises:
            ConfigError: it is not.
        """
        super().check(setting)
        needs_torchao("optimizer.kind", self.kind, cure="try optimizer=adamw")

    def implementation(self) -> OptimizerFactory:
        """Torchao's arithmetic, with averages in the format of this kind."""
        from titanlab.optimizer.low_bit_formats import LowBitFactory

        return LowBitFactory(self)


@option("optimizer", "adamw_8bit")
@dataclass(kw_only=True)
class AdamW8bit(LowBit):
    """AdamW with 8-bit averages (arXiv 2110.02861)."""

    kind: str = "adamw_8bit"


@option("optimizer", "adamw_4bit")
@dataclass(kw_only=True)
class AdamW4bit(LowBit):
    """AdamW with 4-bit averages (arXiv 2309.01507)."""

    kind: str = "adamw_4bit"
    block_size: int = 128


@option("optimizer", "adamw_fp8")
@dataclass(kw_only=True)
class AdamWFp8(LowBit):
    """AdamW with averages in float8 e4m3 (after arXiv 2409.12517)."""

    kind: str = "adamw_fp8"

    def check(self, setting: Setting) -> None:
        """Check that the GPU can convert to float8.

        Raises:
            ConfigError: it is too old.
        """
        super().check(setting)
        capability = hardware.compute_capability(setting.device)
        if setting.accelerator == "cuda" and capability is not None and capability < _FP8_CAPABILITY:
            raise ConfigError(
                "optimizer.kind",
                self.kind,
                f"converts to float8, which takes compute capability 8.9, and {setting.device} has less",
                "try optimizer=adamw_8bit",
            )

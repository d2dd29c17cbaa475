"""Config of optimizer=adamw_fp8."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs import hardware
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.optimizer.low_bit_schema import LowBit
from titanlab.options import option

# Of GPUs whose compilers can convert to float8.
_NEEDED = (8, 9)


@option("optimizer", "adamw_fp8")
@dataclass(kw_only=True)
class AdamWFp8(LowBit):
    """AdamW with averages in float8 e4m3 (after arXiv 2409.12517)."""

    kind: str = "adamw_fp8"

    def check(self, setting: Setting) -> None:
        """The GPU knows float8."""
        super().check(setting)
        capability = hardware.compute_capability(setting.device)
        if setting.accelerator == "cuda" and capability is not None and capability < _NEEDED:
            raise ConfigError(
                "optimizer.kind",
                self.kind,
                f"converts to float8, which takes compute capability 8.9, and {setting.device} has less",
                "try optimizer=adamw_8bit",
            )

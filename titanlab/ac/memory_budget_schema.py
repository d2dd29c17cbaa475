"""Config of ac=memory_budget."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option

# These split a block's graph into forward and backward where it costs least, which is where a budget counts.
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")


@option("ac", "memory_budget")
@dataclass(kw_only=True)
class MemoryBudget:
    """torch's compiler chooses what each block keeps, so that little is computed again and the budget holds.

    Attributes:
        budget: between 0, where blocks keep their inputs only, and 1, where they keep what makes them fastest.
    """

    kind: str = "memory_budget"
    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            cure = f"try {min(1.0, max(0.0, self.budget))}" if self.budget == self.budget else "try 0.5"
            raise ConfigError("ac.budget", self.budget, "must lie between 0 and 1", cure)

    def check(self, setting: Setting) -> None:
        if not setting.compiled:
            rule = "is kept by the compiler, and the blocks are not compiled"
            raise ConfigError("ac", self.kind, rule, "try compile=block, or ac=selective_op")
        if setting.compiled not in BACKENDS:
            rule = f"compile.backend={setting.compiled} knows no budget"
            raise ConfigError("ac", self.kind, rule, f"try compile.backend={BACKENDS[0]} or {BACKENDS[1]}")

"""Config of ac=memory_budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.ac.contract import ACConfig
from titanlab.costs.account import Operation, Share, block_input, kept
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option

# Backends that use torch's min-cut partitioner, which applies the budget.
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")


@option("ac", "memory_budget")
@dataclass(kw_only=True)
class MemoryBudget(ACConfig):
    """torch's compiler chooses what each block keeps: as little as possible is recomputed within the budget.

    Attributes:
        budget: between 0, where blocks keep their inputs only, and 1, where they keep what makes them fastest.
    """

    kind: str = "memory_budget"
    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            cure = f"try {min(1.0, max(0.0, self.budget))}" if self.budget == self.budget else "try 0.5"
            raise ConfigError("ac.budget", self.budget, "must lie between 0 and 1", cure)

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """An upper bound.

        The compiler applies the budget to what lies between a block's input and what it would keep at its fastest.
        That is less than what autograd keeps without it; which tensors it keeps depends on its version.
        """
        least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept(block))
        return round(least + self.budget * (most - least))

    def compiler_budget(self) -> float:
        """The budget: blocks themselves stay as they are."""
        return self.budget

    def check(self, setting: Setting) -> None:
        """Check that blocks are compiled by a backend that has budgets.

        Raises:
            ConfigError: they are not.
        """
        if not setting.compiled:
            rule = "is kept by the compiler, and the blocks are not compiled"
            raise ConfigError("ac", self.kind, rule, "try compile=block, or ac=selective_op")
        if setting.compiled not in BACKENDS:
            rule = f"compile.backend={setting.compiled} knows no budget"
            raise ConfigError("ac", self.kind, rule, f"try compile.backend={BACKENDS[0]} or {BACKENDS[1]}")

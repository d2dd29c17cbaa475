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
    """torch's compiler chooses the activations that each block keeps, with the least recomputation in the budget.

    Attributes:
        budget: from 0, where blocks keep only their inputs, to 1, where they keep the activations that make them
            fastest.
    """

    kind: str = "memory_budget"
    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            cure = f"try {min(1.0, max(0.0, self.budget))}" if self.budget == self.budget else "try 0.5"
            raise ConfigError("ac.budget", self.budget, "must lie between 0 and 1", cure)

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """An upper bound.

        The compiler applies the budget to the bytes between a block's input and the activations that make it fastest,
        which are fewer than autograd keeps without a compiler; the choice of tensors depends on its version.
        """
        least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept(block))
        return round(least + self.budget * (most - least))

    def compiler_budget(self) -> float:
        """The budget."""
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

"""What ac=memory_budget keeps of a block, at most."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.ac.memory_budget_schema import MemoryBudget
from titanlab.costs.account import Operation, Share, block_input, kept


def saved_bytes(config: MemoryBudget, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """An upper bound of the bytes that one rank keeps of block `number` between its forward and its backward.

    The compiler is given the budget as a share of what lies between a block's input and what it would keep at its
    fastest, which is less than what autograd keeps without it; which tensors it takes depends on its version.
    """
    least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept(block))
    return round(least + config.budget * (most - least))

"""ac=memory_budget: what blocks keep is chosen where they are compiled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from titanlab.ac.memory_budget_schema import MemoryBudget


def apply(config: MemoryBudget, blocks: Mapping[int, nn.Module]) -> None:
    """Leave the blocks as they are: their compilation is given the budget."""

"""What a policy of activation checkpointing is: a config, which needs no torch, and an implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from titanlab.costs.account import Operation, Share, block_input, kept
from titanlab.costs.setting import Setting

if TYPE_CHECKING:
    from torch import nn


class ACConfig(Protocol):
    """Config of a policy. A dataclass that inherits from it has to define `kind`.

    Blocks are counted in the whole model, however a pipeline cuts it into stages. By default nothing is recomputed.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str

    def recomputes(self, number: int) -> bool:
        """Whether block `number` keeps its input only, and its forward is computed again in the backward."""
        return False

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """Bytes that one rank keeps of block `number` between its forward and its backward."""
        return share.bytes_of([block_input(block)] if self.recomputes(number) else kept(block))

    def compiler_budget(self) -> float | None:
        """Share of a compiled block's activations that the compiler may keep; None: the compiler decides."""
        return None

    def check(self, setting: Setting) -> None:
        """Check the rest of the recipe against what this policy needs.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def implementation(self) -> ActivationCheckpointing:
        """By default the blocks that `recomputes` chooses are recomputed as a whole."""
        from titanlab.ac.block import WholeBlocks

        return WholeBlocks(self)


class ActivationCheckpointing(Protocol):
    """Implementation of a policy."""

    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
        """Checkpoint blocks of this rank, in place.

        Args:
            blocks: by number in the whole model.

        Raises:
            ConfigError: what the policy names does not exist.
        """

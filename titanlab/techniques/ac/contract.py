"""The contract of a policy of activation checkpointing: a torch-free config, and an implementation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from titanlab.costs import Operation, OptionConfig, Share, block_input, kept_activations

if TYPE_CHECKING:
    from torch import nn


class ACConfig(OptionConfig, Protocol):
    """Config of a policy of activation checkpointing. A dataclass that inherits from this class must define `kind`.

    Blocks are numbered in the full model, not in a pipeline stage. By default no block is recomputed.
    """

    def recomputes(self, number: int) -> bool:
        """Whether block `number` keeps only its input and is recomputed in the backward pass."""
        return False

    def treatment(self, number: int) -> object:
        """A key of block `number`: blocks with equal keys get equal results from all other methods.

        Override this method if another method depends on the block's number in a way that `recomputes` does not show.
        """
        return self.recomputes(number)

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """Bytes of block `number` that one rank keeps between its forward and its backward."""
        return share.bytes_of([block_input(block)] if self.recomputes(number) else kept_activations(block))

    def recomputed(self, block: Sequence[Operation], *, number: int) -> tuple[str, ...]:
        """Names of the operations of block `number` that run again in the backward pass.

        torch stops a recomputation once it has the inputs of the last operation that keeps inputs
        (`torch.utils.checkpoint`, early stop). Therefore neither this last operation nor a later one runs again.
        """
        return needed_again(block) if self.recomputes(number) else ()

    def repeats_collective(self, operator: str, *, number: int) -> bool:
        """Whether the backward pass of block `number` repeats the forward collectives of this operator of torch."""
        return self.recomputes(number)

    def compiler_budget(self) -> float | None:
        """Share of a compiled block's activations that the compiler may keep; None: the compiler decides."""
        return None

    def describe(self) -> str:
        """The policy's text in the table at a run's start; empty: the table has no row for it."""
        return self.kind

    def reduced(self, *, note: Callable[[str], None]) -> ACConfig:
        """This policy for the small copy (two or more blocks) that proofs and rehearsals train; by default unchanged.

        Args:
            note: called with one line for each difference.
        """
        return self

    def implementation(self) -> ActivationCheckpointing:
        """The implementation; by default it recomputes completely the blocks that `recomputes` chooses."""
        from titanlab.techniques.ac.recomputation import WholeBlocks

        return WholeBlocks(self)


def needed_again(block: Sequence[Operation]) -> tuple[str, ...]:
    """Names of a block's operations that run before the last operation that keeps inputs."""
    last = max((place for place, operation in enumerate(block) if operation.keeps), default=0)
    return tuple(operation.name for operation in block[:last])


class ActivationCheckpointing(Protocol):
    """Applies a policy to a model's blocks."""

    @abstractmethod
    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
        """Checkpoint blocks of this rank, in place.

        Args:
            blocks: the blocks by their number in the full model.

        Raises:
            ConfigError: the policy names an operator that does not exist.
        """

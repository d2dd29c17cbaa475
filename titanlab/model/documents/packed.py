"""Where the documents of packed sequences are, in the form in which models get it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


class HostStarts:
    """Places where documents begin, [batch, seq] int64, which stay on the CPU.

    FSDP2 and DDP copy the tensors among a model's arguments to its device, also those in tuples, lists and
    dictionaries; they hand on any other object as it is.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True)
class Packed:
    """The documents of a batch's sequences.

    Attributes:
        positions: of each token in its document, [batch, seq] int64.
        starts: the place of the first token of each token's document in the sequence, [batch, seq] int64.
        stays_on_host: whether `starts` is on the CPU on every device, as context parallelism needs it.
    """

    positions: Tensor
    starts: Tensor
    stays_on_host: bool = False

    def padded(self, missing: int) -> Packed:
        """The same with so many sequences more, each of one document; nothing of them counts."""
        positions, starts = (F.pad(part, (0, 0, 0, missing)) for part in (self.positions, self.starts))
        return Packed(positions, starts, self.stays_on_host)

    def arguments(self, rows: slice) -> tuple[Tensor, Tensor | HostStarts]:
        """What a model gets of some sequences after their tokens."""
        starts = self.starts[rows]
        return self.positions[rows], HostStarts(starts) if self.stays_on_host else starts

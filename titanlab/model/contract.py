"""What assembly expects of a model, of ours or of another package's."""

from __future__ import annotations

import torch
from torch import nn


class LanguageModel(nn.Module):
    """Tokens [batch, seq] → logits [batch, seq, vocab].

    Attributes:
        layers: the blocks, by index: what is sharded one by one.
    """

    layers: nn.ModuleDict

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute what no checkpoint holds, on `device`; called once storage is there. By default nothing."""

"""The base class of a model's modules, of ours or of another package's."""

from __future__ import annotations

import torch
from torch import nn


class LanguageModel(nn.Module):
    """`forward(tokens, positions)`: ids [batch, seq], positions [seq] → logits [batch, seq, vocab].

    Without positions these are 0, 1, …. With some of its account's `pieces` set to None or taken from `layers`
    the model is a stage of a pipeline, whose input and output are hidden states [batch, seq, dim].

    Attributes:
        layers: the blocks, by index; each is sharded on its own.
    """

    layers: nn.ModuleDict

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute what no checkpoint holds, on `device`; called once storage is there. By default nothing."""

"""The base class of models, also of those in other packages."""

from __future__ import annotations

import torch
from torch import nn


class LanguageModel(nn.Module):
    """`forward(tokens, positions)`: ids [batch, seq], positions [seq] → logits [batch, seq, vocab].

    Positions are 0, 1, … by default. A model that masks documents also gets positions [batch, seq] and, as its third
    argument, `starts`: the place [batch, seq] of the first token of each token's document, a tensor or `HostStarts`, of
    which `titanlab.model.documents.masks.prepared` makes what attention takes. With some of its account's `pieces` set
    to None or removed from `layers`, the model is a pipeline stage, whose inputs and outputs between stages are hidden
    states [batch, seq, dim].

    Attributes:
        layers: the blocks, by index; FSDP shards each block separately.
    """

    layers: nn.ModuleDict

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the values that no checkpoint has, on `device`, after the model is materialised; by default none."""

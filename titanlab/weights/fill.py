"""Filling a model, or one rank's part of it, with weights from a folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from titanlab.weights.initialise import local_part, plain_name
from titanlab.weights.source import CHUNK_BYTES, Source


@torch.no_grad()
def fill(model: nn.Module, source: Source) -> None:
    """Copy every parameter of `model` from a source, in place, cast to the parameter's dtype.

    Args:
        model: materialised; parameters are plain tensors or DTensors of any placement. It may be a pipeline stage:
            parameters of other stages are not read.
        source: has the same names and full shapes; a rank reads only its part.
    """
    for name, parameter in model.named_parameters():
        local, offsets = local_part(parameter)
        if local.numel():
            _fill_box(local, offsets, plain_name(name), source)


def _fill_box(local: Tensor, offsets: Sequence[int], name: str, source: Source) -> None:
    width = local.numel() // local.shape[0] * local.element_size()
    step = max(CHUNK_BYTES // max(width, 1), 1)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        part.copy_(source.read(name, [offsets[0] + start, *offsets[1:]], list(part.shape)))

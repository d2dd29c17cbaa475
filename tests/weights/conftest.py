"""What tests of weights share."""

from __future__ import annotations

import torch

from titanlab.train import WeightsSource
from titanlab.train.weights import TensorEntry

FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Tensors:
    """A source of tensors in memory, which notes what is read."""

    model, biases = None, {}
    fill = WeightsSource.fill

    def __init__(self, **tensors):
        self.tensors, self.reads = tensors, []
        self.entries = {
            name: TensorEntry(dtype=FORMATS[tensor.dtype], shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }

    def read(self, name, offsets, sizes):
        self.reads.append((name, list(offsets), list(sizes)))
        return self.tensors[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

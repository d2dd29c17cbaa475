"""The answer of a precision to the question: which dtype where."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Number formats of a run.

    Attributes:
        master: of parameters, gradients and optimizer state at rest.
        compute: of parameters and activations in forward and backward.
        reduce: of gradients while they are summed over processes and microbatches.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def mixed(self) -> bool:
        """True if parameters are cast before they compute."""
        return self.compute != self.master

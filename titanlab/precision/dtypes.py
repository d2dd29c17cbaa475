"""The answer of a precision to the question: which dtype where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlab.precision.account import Formats


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Number formats of a run.

    Attributes:
        master: of parameters, gradients and optimizer state at rest.
        compute: of parameters and activations in forward and backward.
        reduce: of gradients while they are summed over processes and microbatches.
        fp32_parts: what computes in float32 all the same, see `titanlab.precision.account.matched`.
    """

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    fp32_parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, formats: Formats) -> Dtypes:
        """What an account says, as torch has it."""
        master, compute, reduce = (getattr(torch, name) for name in (formats.master, formats.compute, formats.reduce))
        return cls(master=master, compute=compute, reduce=reduce, fp32_parts=formats.fp32_parts)

    @property
    def mixed(self) -> bool:
        """True if parameters are cast before they compute, or gradients before they are summed."""
        return self.compute != self.master or self.reduce != self.master

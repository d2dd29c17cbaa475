"""Number formats as torch's dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from titanlab.precision.account import Formats


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """`titanlab.precision.account.Formats` with torch's dtypes."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    fp32_parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, formats: Formats) -> Dtypes:
        """Look up the dtypes by name."""
        master, compute, reduce = (getattr(torch, name) for name in (formats.master, formats.compute, formats.reduce))
        return cls(master=master, compute=compute, reduce=reduce, fp32_parts=formats.fp32_parts)

    @property
    def mixed(self) -> bool:
        """Whether parameters are cast before they compute, or gradients before they are summed."""
        return self.compute != self.master or self.reduce != self.master

"""One rank's part of a tensor that is distributed over ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor as a plain tensor, differentiable; any other value unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

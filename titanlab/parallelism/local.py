"""What one rank has of a tensor that is spread over ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor as a plain tensor, through which gradients pass; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

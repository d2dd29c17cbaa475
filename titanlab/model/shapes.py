"""Modules that have shapes and no values, before it is known who keeps which part of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Build modules on the meta device, without the initial values that their constructors draw."""
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    """Leaves out `nn.init.normal_` and `Tensor.normal_`, of which `nn.Embedding` draws its values.

    On a meta tensor they do nothing, but torch runs them in Python there and imports its compiler for that (torch 2.11
    to 2.13: `torch._refs.normal_`), which takes 1 s.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        tensor = keywords.get("tensor", args[0] if args else None)
        if func in (nn.init.normal_, Tensor.normal_) and isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **keywords)

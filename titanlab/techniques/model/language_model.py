"""The base class of all models, also of those in other packages, and helpers to build modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LanguageModel(nn.Module):
    """`forward(tokens, positions)`: ids [batch, seq], positions [seq] → logits [batch, seq, vocab].

    Positions are 0, 1, … by default. A model that masks documents gets positions [batch, seq] and a third argument
    `starts` [batch, seq], a tensor or `HostStarts`: for each token, where its document begins in the sequence.
    `titanlab.techniques.model.attention.prepared` converts `starts` for the kernel. In a pipeline stage the `pieces` of
    other stages are None or removed from `layers`; stages send each other hidden states [batch, seq, dim].

    Attributes:
        layers: the blocks, by index; FSDP shards each block separately.
    """

    layers: nn.ModuleDict

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute on `device` the buffers that no checkpoint holds, once the model is materialised; by default none."""


class Projections(nn.Module):
    """Calls several linear layers with the same inputs [..., in] → a tuple of their outputs [..., out].

    It is a separate module so that `parallelism/pipeline_weights.py` can compute one product in place of several.
    """

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        return tuple(layer(inputs) for layer in layers)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Build modules on the meta device, without the initial values that their constructors draw."""
    with torch.device("meta"), _NoInitialValues():
        yield


class _NoInitialValues(TorchFunctionMode):
    """Skips `nn.init.normal_` and `Tensor.normal_`, with which `nn.Embedding` draws its values.

    On a meta tensor these functions have no effect, but torch imports its compiler to run them (torch 2.11 to 2.13:
    `torch._refs.normal_`), which takes 1 s.
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

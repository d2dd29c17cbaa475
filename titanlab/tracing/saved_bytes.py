"""What each block keeps between its forward and its backward, measured at the storages of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]


class SavedBytes:
    """Measures the first microbatch of each block.

    Hooks on saved tensors do not see what selective checkpointing keeps, so storages count: those that a block's
    forward has made and that still exist when its backward begins, and its input if it still exists then. Its output
    is the next block's input. FSDP's gathers run outside: before the hooks here, and after them.

    Attributes:
        by_block: bytes by number of the block, for those whose backward has begun.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]) -> None:
        self.by_block: dict[int, int] = {}
        self._made: _Made | None = None
        self._input: weakref.ref[torch.UntypedStorage] | None = None
        self._handles: dict[int, list[RemovableHandle]] = {
            number: [
                block.register_forward_pre_hook(lambda _, inputs: self._begin(inputs)),
                block.register_forward_hook(
                    lambda _, __, output, number=number: self._end(number, output), prepend=True
                ),
            ]
            for number, block in blocks.items()
        }

    def _begin(self, inputs: tuple[Any, ...]) -> None:
        self._input = weakref.ref(inputs[0].untyped_storage())
        self._made = _Made()
        self._made.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, number: int, output: Tensor) -> None:
        made, input_storage = self._made, self._input
        assert made is not None
        assert input_storage is not None
        made.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._made = self._input = None
        for handle in self._handles.pop(number):
            handle.remove()
        made.storages.pop(output.untyped_storage()._cdata, None)
        storages = [*made.storages.values(), input_storage]

        def count(_: Tensor) -> None:
            self.by_block[number] = sum(storage.nbytes() for ref in storages if (storage := ref()) is not None)

        # Called when the block's backward begins.
        output.register_hook(count)


class _Made(TorchDispatchMode):
    """Notes the storages that operators make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: Storages = {}

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_traceable_wrapper_subclass(tensor) for tensor in inputs):
            # The subclass runs its own code first; that code's operators on plain tensors are dispatched here later.
            return NotImplemented
        results = func(*args, **kwargs)
        old = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in tree_leaves(results):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in old:
                self.storages[storage._cdata] = weakref.ref(storage)
        return results

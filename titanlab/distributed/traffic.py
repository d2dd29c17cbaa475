"""What a region of code sends: every collective and every message between ranks, counted as it is issued."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# Private, but what functional collectives name groups by, in torch 2.11 as in 2.13.
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

# Public through `torch.distributed.tensor.debug.CommDebugMode` only, which knows no groups, no bytes and no messages.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlab.costs.traffic_table import Traffic
from titanlab.distributed.mesh import Mesh


def axis_groups(mesh: Mesh) -> dict[str, str]:
    """Name of a process group → axis, or `world`.

    A group of all ranks is one and the same for torch, whether as the world or as the one axis that has them all:
    then it is called by the axis.
    """
    names: dict[str, str] = {group.group_name: axis for axis, group in mesh.groups().items()}
    if dist.is_initialized() and dist.group.WORLD is not None:
        names.setdefault(dist.group.WORLD.group_name, "world")
    return names


@contextlib.contextmanager
def traced(axes: Mapping[str, str]) -> Iterator[Traffic]:
    """Count what this rank's code inside the block sends; the table is whole when the block ends.

    Seen are operators in the order of their dispatch, whoever issues them: Python, autograd's threads, DDP's reducer,
    FSDP's hooks, DTensor, custom operators. Nothing is added to what they do, but each of them takes some
    microseconds longer. Of compiled code, what it sends when it runs is seen, and it is compiled as it would be.

    Args:
        axes: name of a process group → axis; see `axis_groups`. The others are counted as `other`.
    """
    traffic = Traffic()
    with _Tracer(axes, traffic):
        yield traffic


class _Tracer(TorchDispatchMode):
    # Compiled code that computes a block again has operators around attention that keep the state of generators.
    supports_higher_order_operators = True

    def __init__(self, axes: Mapping[str, str], traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes, self._traffic = axes, traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise torch would not compile inside the block, and skip for good what it has met there."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _COMPOSED.isdisjoint(types):
            # Subclasses run their own code first; its operators on plain tensors are dispatched here afterwards.
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs)
        elif func._defined_in_python:
            return self._inside(func, args, kwargs)
        return func(*args, **kwargs)

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is written in Python so that what it sends is seen too.

        Inside this method the mode is off; called with it on, the operator would come by here again. So it is called
        below the dispatch key of modes, by what torch's own custom operators use to get from one key to the next.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            return func(*args, **kwargs)
        keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors))
        keys = keys & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
        with self:
            return func.redispatch(keys, *args, **kwargs)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        named = given.get("process_group", given.get("group_name"))
        if named is None:
            return  # it waits for one that has been counted
        group = _group(named)
        name = func._schema.name.rpartition(":")[2]
        kind, size = next((known for word, known in _KINDS.items() if word in name), (name, _INPUT))
        axis, ranks = self._axes.get(group.group_name, "other"), group.size()
        self._traffic.add(axis, kind, size(given, ranks), ranks=ranks, own=_own(kind, given, group))


def _group(given: Any) -> dist.ProcessGroup:
    """The group that an operator was given: by name, as itself, or in the box in which the dispatcher has it."""
    if isinstance(given, dist.ProcessGroup):
        return given
    return dist.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else _resolve_process_group(given)


def _first(*names: str) -> Callable[[dict[str, Any], int], int]:
    """Bytes of the argument that goes by one of these names."""

    def size(given: dict[str, Any], ranks: int) -> int:
        tensors = next((given[name] for name in names if name in given), None)
        return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))

    return size


def _gathered(given: dict[str, Any], ranks: int) -> int:
    # Functional collectives are given no output.
    if "group_size" in given:
        return _INPUT(given, ranks) * ranks
    return _first("output_tensors", "output_lists", "output_tensor", "outputs")(given, ranks)


def _nothing(given: dict[str, Any], ranks: int) -> int:
    return 0


def _own(kind: str, given: dict[str, Any], group: dist.ProcessGroup) -> int | None:
    """Bytes of its own input that a rank keeps in an `all_to_all` of unequal parts."""
    splits = given.get("input_split_sizes") if kind == "all_to_all" else None
    if not splits:
        return None
    row: Tensor = given["input"][:1]
    return int(splits[group.rank()]) * row.nbytes


_INPUT = _first("input_tensors", "input_list", "input_tensor", "inputs", "input", "tensors", "tensor")
_COMPOSED = {DTensor, AsyncCollectiveTensor}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The first word that is in an operator's name tells its kind: torch has a dozen spellings of some.
_KINDS: dict[str, tuple[str, Callable[[dict[str, Any], int], int]]] = {
    "allgather": ("all_gather", _gathered),
    "all_gather": ("all_gather", _gathered),
    "reduce_scatter": ("reduce_scatter", _INPUT),
    "allreduce": ("all_reduce", _INPUT),
    "all_reduce": ("all_reduce", _INPUT),
    "alltoall": ("all_to_all", _INPUT),
    "all_to_all": ("all_to_all", _INPUT),
    "broadcast": ("broadcast", _INPUT),
    "reduce_": ("reduce", _INPUT),
    "gather_": ("gather", _gathered),
    "scatter_": ("scatter", _INPUT),
    "barrier": ("barrier", _nothing),
    "send": ("send", _INPUT),
    "recv": ("recv", _INPUT),
}

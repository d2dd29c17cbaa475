"""Communication of a region of code: every collective and point-to-point message, counted when it is issued."""

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

# Private: resolves the group names that functional collectives use, the same in torch 2.11 to 2.13.
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

# Private: the public `torch.distributed.tensor.debug.CommDebugMode` records no groups, no bytes and no messages.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlab.costs import Traffic
from titanlab.distributed.mesh import EXPERT_AXES, Mesh


def axis_groups(mesh: Mesh) -> dict[str, str]:
    """Name of a process group → axis, or `world`.

    If one axis has all ranks, torch uses the world's group for it: the group then has the name of the axis.
    """
    groups = mesh.groups()
    names: dict[str, str] = {group.group_name: axis for axis, group in groups.items() if axis not in EXPERT_AXES}
    for axis in (axis for axis in EXPERT_AXES if axis in groups):
        names.setdefault(groups[axis].group_name, axis)
    if mesh.experts is not None and mesh.layout.replicate > 1:
        names.setdefault(mesh.experts["replicate"].get_group().group_name, "replicate")
    if dist.is_initialized() and dist.group.WORLD is not None:
        names.setdefault(dist.group.WORLD.group_name, "world")
    return names


@contextlib.contextmanager
def traced(axes: Mapping[str, str]) -> Iterator[Traffic]:
    """Count the communication of this rank's code inside the block; the table is complete when the block ends.

    It counts operators of Python code, autograd's threads, DDP's reducer, FSDP's hooks, DTensor and custom operators
    when they are dispatched. Each operator takes some microseconds longer; its result is the same. Compiled code is
    counted when it runs, and compilation is not affected.

    Args:
        axes: name of a process group → axis; see `axis_groups`. Other groups are counted as `other`.
    """
    traffic = Traffic()
    with _Tracer(axes, traffic):
        yield traffic


@contextlib.contextmanager
def marked_collectives(axes: Mapping[str, str]) -> Iterator[None]:
    """Annotate every collective and message inside the block for torch.profiler: `titanlab.issue:AXIS:KIND` before it.

    gloo's own events do not name their process group.
    """
    with _Marker(axes, Traffic()):
        yield


class _Tracer(TorchDispatchMode):
    # Compiled code that recomputes a block wraps attention in higher-order operators, which keep the generators' state.
    supports_higher_order_operators = True

    def __init__(self, axes: Mapping[str, str], traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes, self._traffic = axes, traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch would not compile inside the block, and never compile functions seen there."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _COMPOSED.isdisjoint(types):
            # The subclass runs its own code first; that code's operators on plain tensors are dispatched here later.
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs)
        elif func._defined_in_python:
            return self._call_traced(func, args, kwargs)
        return func(*args, **kwargs)

    def _call_traced(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is written in Python so that its own communication is counted too.

        The mode is off inside this method; with the mode on, a plain call would come back here. So `redispatch` starts
        below the dispatch key of modes, as torch's own custom operators do to reach the next key.
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
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        group_argument = arguments.get("process_group", arguments.get("group_name"))
        if group_argument is None:
            return  # an operator that waits for a collective that has been counted
        group = _group(group_argument)
        name = func._schema.name.rpartition(":")[2]
        kind, size = next((entry for word, entry in _KINDS.items() if word in name), (name, _INPUT))
        axis, ranks = self._axes.get(group.group_name, "other"), group.size()
        self._note(axis, kind, size(arguments, ranks), ranks=ranks, own=_own(kind, arguments, group))

    def _note(self, axis: str, kind: str, size: int, *, ranks: int, own: int | None) -> None:
        self._traffic.add(axis, kind, size, ranks=ranks, own=own)


class _Marker(_Tracer):
    def _note(self, axis: str, kind: str, size: int, *, ranks: int, own: int | None) -> None:
        with record_function(f"titanlab.issue:{axis}:{kind}"):
            pass


def _group(argument: Any) -> dist.ProcessGroup:
    """The process group in an operator's argument: a name, the group itself, or the dispatcher's boxed group."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        return dist.ProcessGroup.unbox(argument)
    return _resolve_process_group(argument)


def _first(*names: str) -> Callable[[dict[str, Any], int], int]:
    """A function that gives the bytes of the first argument with one of these names."""

    def size(arguments: dict[str, Any], ranks: int) -> int:
        tensors = next((arguments[name] for name in names if name in arguments), None)
        return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))

    return size


def _gathered(arguments: dict[str, Any], ranks: int) -> int:
    # Functional collectives have no output argument.
    if "group_size" in arguments:
        return _INPUT(arguments, ranks) * ranks
    return _first("output_tensors", "output_lists", "output_tensor", "outputs")(arguments, ranks)


def _own(kind: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> int | None:
    """Bytes of its own input that a rank keeps in an `all_to_all` of unequal parts."""
    splits = arguments.get("input_split_sizes") if kind == "all_to_all" else None
    if not splits:
        return None
    row: Tensor = arguments["input"][:1]
    return int(splits[group.rank()]) * row.nbytes


_INPUT = _first("input_tensors", "input_list", "input_tensor", "inputs", "input", "tensors", "tensor")
_COMPOSED = {DTensor, AsyncCollectiveTensor}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The first of these words in an operator's name gives its kind: torch spells some kinds in a dozen ways.
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
    "barrier": ("barrier", lambda arguments, ranks: 0),
    "send": ("send", _INPUT),
    "recv": ("recv", _INPUT),
}

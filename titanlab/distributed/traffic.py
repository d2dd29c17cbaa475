"""Collectives and messages of this process: counts them when they are issued, or reads torch's Flight Recorder."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import operator
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# Private, the same in torch 2.11 to 2.13: finds the group by the name that functional collectives use.
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

# Private: the public `torch.distributed.tensor.debug.CommDebugMode` records no groups, no bytes and no messages.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlab.costs import Traffic
from titanlab.distributed.hang import innermost_own
from titanlab.distributed.mesh import EXPERT_AXES, Mesh
from titanlab.distributed.world import BESIDE
from titanlab.records import CodeLine, Collective, GroupRecord, Messages


def axis_groups(mesh: Mesh) -> dict[str, str]:
    """The axis of each process group, or `world`, by the name of the group.

    If one axis has all ranks, torch uses the world's group for it: that group then counts as the axis.
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
    """Count the communication of this rank's code inside the block; the counts are complete when the block ends.

    Operators of Python code, autograd's threads, DDP's reducer, FSDP's hooks, DTensor and custom operators are counted
    when they are dispatched. Each operator takes some microseconds longer; its result is the same. Compiled code is
    counted when it runs, and compilation is not affected.

    Args:
        axes: name of a process group → axis; see `axis_groups`. Other groups are counted as `other`.
    """
    traffic = Traffic()
    with _Tracer(axes, traffic.add):
        yield traffic


@contextlib.contextmanager
def marked_collectives(axes: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, mark every collective and message for torch.profiler: `titanlab.issue:AXIS:KIND` precedes it.

    gloo's own events do not name their process group.
    """

    def mark(axis: str, kind: str, size: int, *, ranks: int, own: int | None) -> None:
        with record_function(f"titanlab.issue:{axis}:{kind}"):
            pass

    with _Tracer(axes, mark):
        yield


class _Tracer(TorchDispatchMode):
    # If compiled code recomputes a transformer block, attention is in higher-order operators, which keep RNG states.
    supports_higher_order_operators = True

    def __init__(self, axes: Mapping[str, str], note: Callable[..., None]) -> None:
        """`note`: called with the arguments of `Traffic.add` before each collective or message."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes, self._note = axes, note

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch would compile nothing while the mode is on, nor later the functions that ran then."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _COMPOSED.isdisjoint(types):
            # Let the tensor's subclass run its own code: this method then gets that code's operators on plain tensors.
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
        below the dispatch key of modes. torch's own custom operators reach the next key in the same way.
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
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is None:
            return  # The operator only waits for a collective that has been counted.
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif not isinstance(group, dist.ProcessGroup):
            group = _resolve_process_group(group)
        name = func._schema.name.rpartition(":")[2]
        kind = next((kind for word, kind in _KINDS.items() if word in name), name)
        own, size = None, _bytes_of_first(arguments, _OUTPUTS if kind in ("all_gather", "gather") else _INPUTS)
        if kind == "barrier":
            size = 0
        elif kind == "all_gather" and "group_size" in arguments:
            # Functional collectives have no output argument.
            size = _bytes_of_first(arguments, _INPUTS) * group.size()
        elif kind == "all_to_all" and arguments.get("input_split_sizes"):
            # The parts are unequal: `own` is the part that the rank keeps of its own input.
            own = int(arguments["input_split_sizes"][group.rank()]) * arguments["input"][:1].nbytes
        self._note(self._axes.get(group.group_name, "other"), kind, size, ranks=group.size(), own=own)


def _bytes_of_first(arguments: Mapping[str, Any], names: Sequence[str]) -> int:
    """The bytes of the first argument with one of these names."""
    tensors = next((arguments[name] for name in names if name in arguments), None)
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


_INPUTS = ("input_tensors", "input_list", "input_tensor", "inputs", "input", "tensors", "tensor")
_OUTPUTS = ("output_tensors", "output_lists", "output_tensor", "outputs")
_COMPOSED = {DTensor, AsyncCollectiveTensor}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The first of these words that is in an operator's name gives its kind; torch spells some kinds in a dozen ways.
_KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}

# How many of the last collectives a record of a hang has. They must span more than one training step.
KEPT = 1000
_DUMP_SECONDS = 2.0
# Functions that dump each backend's Flight Recorder; torch without CUDA has only the first. They are private: there are
# no public ones. The dumps in JSON have no lines of code; those with lines are pickles.
_DUMPS: tuple[Callable[[], bytes] | None, ...] = (
    getattr(c10d, "_dump_fr_trace_json", None),
    getattr(c10d, "_dump_nccl_trace_json", None),
)
# torch may take seconds to look the lines up.
_DUMPS_WITH_LINES: tuple[Callable[[], bytes] | None, ...] = (
    getattr(c10d, "_dump_fr_trace", None),
    getattr(c10d, "_dump_nccl_trace", None),
)
_LINES_SECONDS = 4.0


def topology(mesh: Mesh, messages: Callable[[], Messages | None] = lambda: None) -> Callable[..., Mapping[str, Any]]:
    """A function that returns fields of `HangRecord`: this rank's place in a mesh, and its communication.

    If that function is called with `with_lines=True`, collectives have their lines of code, which may take seconds.

    Args:
        messages: returns the state of the pipeline's sends and receives; None without a pipeline.
    """
    groups, axes = dict(mesh.groups()), axis_groups(mesh)
    if dist.group.WORLD is not None:
        groups["world"] = dist.group.WORLD
    place = {
        "groups": {
            group.group_name: GroupRecord(
                axes.get(group.group_name, "other"), tuple(dist.get_process_group_ranks(group))
            )
            for group in groups.values()
        },
        "coordinates": {axis: mesh.coordinate(axis) for axis, degree in mesh.layout.degrees().items() if degree > 1},
    }
    return lambda with_lines=False: {
        **place,
        "messages": messages(),
        "collectives": tuple(last_collectives(with_lines=with_lines)),
    }


class _PlainValues(pickle.Unpickler):
    """Reads a pickle of texts, numbers, lists and mappings; anything else is an error, and nothing is imported."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a dump of torch's recorder names {module}.{name}")

    @classmethod
    def read(cls, content: bytes) -> Any:
        return cls(io.BytesIO(content)).load()


def _entries(dump: Callable[[], bytes], read: Callable[[bytes], Any], seconds: float) -> list[dict[str, Any]]:
    """The entries of a dump; empty if torch does not answer in time."""
    entries: list[dict[str, Any]] = []
    # Dump in a separate thread: the thread that hangs may hold the recorder's lock.
    thread = threading.Thread(
        target=lambda: entries.extend(read(dump()).get("entries", [])), name="flight-recorder", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return entries


def last_collectives(kept: int = KEPT, *, with_lines: bool = False) -> list[Collective]:
    """The last collectives that this process has called, oldest first; empty if the recorder is off.

    torch keeps the last TORCH_FR_BUFFER_SIZE collectives in a ring in memory. With gloo torch 2.13 records no sends and
    receives, and no times. Leaves out collectives of `World.beside`: another thread calls these, and the training does
    not wait for them.
    """
    calls: dict[tuple[Any, ...], Collective] = {}
    dumps, seconds = (_DUMPS_WITH_LINES, _LINES_SECONDS) if with_lines else (_DUMPS, _DUMP_SECONDS)
    read: Callable[[bytes], Any] = _PlainValues.read if with_lines else json.loads
    for dump in filter(None, dumps):
        for entry in _entries(dump, read, seconds):
            group, *descriptions = entry.get("process_group") or [""]
            if BESIDE in descriptions:
                continue
            is_message = bool(entry.get("is_p2p"))
            frames = [CodeLine(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames") or []]
            call = Collective(
                group=str(group),
                sequence=entry.get("p2p_seq_id" if is_message else "collective_seq_id", 0),
                operation=str(entry.get("profiling_name", "")).rpartition(":")[2],
                sizes=tuple(map(tuple, entry.get("input_sizes", []))),
                dtypes=tuple(entry.get("input_dtypes", [])),
                is_message=is_message,
                # With gloo the state stays `scheduled`; only `retired` shows that a collective is complete.
                is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
                created=entry.get("time_created_ns", 0) / 1e9,
                started=(entry.get("time_discovered_started_ns") or 0) / 1e9,
                ended=(entry.get("time_discovered_completed_ns") or 0) / 1e9,
                source=innermost_own(frames),
            )
            # Both dumps may contain the same collectives: keep each once.
            calls[call.group, call.is_message, call.sequence, call.created] = call
    return sorted(calls.values(), key=lambda call: call.created)[-kept:]

"""At out-of-memory: what this rank's memory holds, in the first line of the error: the outcome's cause has it."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from titanlab.dtensor import local_part
from titanlab.profiler.memory import resident_bytes
from titanlab.system.text import trimmed

_CUDA_ALLOCATED = re.compile(r"([\d.]+) ([KMG])iB is allocated by PyTorch")
_HOLDS = "this rank holds: "
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@contextlib.contextmanager
def named_consumers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Add to an out-of-memory error of the block what the memory holds, the largest first.

    torch's message stays below that line.
    """
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            error.args = (described(error, model, optimizer),)
        raise


@contextlib.contextmanager
def named_before_steps() -> Iterator[None]:
    """As `named_consumers` before there is a model: what the memory holds is found among the living objects."""
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error) and _HOLDS not in str(error):
            error.args = (_described(error, living(), rest="the rest", when="before its first step "),)
        raise


def described(error: BaseException, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The error's message, with this rank's consumers in its first line."""
    module = failing_module(error, model)
    where = f"; in the forward of {module}" if module else ""
    return _described(error, consumers(model, optimizer), rest="activations and the rest", where=where)


def _described(error: BaseException, sizes: dict[str, int], *, rest: str, when: str = "", where: str = "") -> str:
    message = str(error)
    line = message.splitlines()[0] if message else "out of memory"
    # CUDA's message goes on with a paragraph of advice.
    head = re.split(r"\.? GPU \d|\. Error code", line)[0].rstrip(". ")
    match = _CUDA_ALLOCATED.search(message)
    whole = float(match[1]) * _UNITS[match[2]] if match else resident_bytes()
    sizes[rest] = max(0, int(whole) - sum(sizes.values()))
    parts = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    held = ", ".join(f"{name} {_size(size)}" for size, name in parts)
    return f"{head}; {when}{_HOLDS}{held}{where}\n{message}"


def consumers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes([parameter.grad for parameter in parameters]),
        "optimizer state": _bytes(states),
    }


def living() -> dict[str, int]:
    """Bytes of this process's parameters, gradients, optimizer state and other tensors; shared bytes count once."""
    # Not isinstance: that asks proxies of libraries for their class, and may import what they stand for.
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    optimizers = [value for value in gc.get_objects() if issubclass(type(value), torch.optim.Optimizer)]
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    kinds: dict[str, Iterable[object]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": [
            value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
        ],
        "other tensors": tensors,
    }
    seen = set[int]()
    return {name: _bytes_of_new(values, seen) for name, values in kinds.items()}


def _bytes_of_new(values: Iterable[object], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, to which they are added."""
    total = 0
    for value in values:
        # Some kinds of tensors have no storage.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            local = local_part(value)
            if not isinstance(local, torch.Tensor) or local.device.type == "meta":
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def failing_module(error: BaseException, model: nn.Module) -> str:
    """The name of the innermost module whose forward raised; empty if none did."""
    names = {id(module): name for name, module in model.named_modules()}
    name, trace = "", error.__traceback__
    while trace is not None:
        name = names.get(id(trace.tb_frame.f_locals.get("self")), name)
        trace = trace.tb_next
    return name


def _size(count: int) -> str:
    return f"{trimmed(count / 2**30)} GiB" if count >= 2**30 else f"{trimmed(count / 2**20)} MiB"


def _bytes(values: Iterable[object]) -> int:
    tensors = map(local_part, values)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)

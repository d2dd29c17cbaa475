"""At out-of-memory: what this rank's memory holds, in the first line of the error: the outcome's cause has it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlab.profiler.memory import resident_bytes

_CUDA_ALLOCATED = re.compile(r"([\d.]+) ([KMG])iB is allocated by PyTorch")
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


def described(error: BaseException, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The error's message, with this rank's consumers in its first line."""
    message = str(error)
    line = message.splitlines()[0] if message else "out of memory"
    # CUDA's message goes on with a paragraph of advice.
    head = re.split(r"\.? GPU \d|\. Error code", line)[0].rstrip(". ")
    sizes = consumers(model, optimizer)
    found = _CUDA_ALLOCATED.search(message)
    whole = float(found[1]) * _UNITS[found[2]] if found else resident_bytes()
    sizes["activations and the rest"] = max(0, int(whole) - sum(sizes.values()))
    parts = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    held = ", ".join(f"{name} {_size(size)}" for size, name in parts)
    module = failing_module(error, model)
    return f"{head}; this rank holds: {held}{f'; in the forward of {module}' if module else ''}\n{message}"


def consumers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes([parameter.grad for parameter in parameters]),
        "optimizer state": _bytes(states),
    }


def failing_module(error: BaseException, model: nn.Module) -> str:
    """The name of the innermost module whose forward raised; empty if none did."""
    names = {id(module): name for name, module in model.named_modules()}
    name, trace = "", error.__traceback__
    while trace is not None:
        name = names.get(id(trace.tb_frame.f_locals.get("self")), name)
        trace = trace.tb_next
    return name


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _bytes(values: Iterable[object]) -> int:
    tensors = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)

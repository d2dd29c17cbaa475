"""Initial values: from a source of weights, or from seed, parameter name and position in the full tensor only.

Each element is computed from its position in the full tensor, so that every rank of every layout can fill its part
alone: one process and 512 processes start from the same model. No random generator is used or changed; DTensor's RNG
would need an accelerator and the same calls on all ranks.

An element's 64-bit state is key(seed, name) + (index + 1)·γ; SplitMix64 mixes it (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), its upper 24 bits give a uniform number, and the inverse of
the truncated normal's distribution gives the value. The integers are the same on every device; erfinv may differ in
the last bit between kinds of device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from titanlab.costs import Init
from titanlab.dtensor import own_box
from titanlab.train.weights import WeightsSource

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CUT = 3.0  # standard deviations at which the normal is truncated
# Number of elements that are filled at a time; each needs 20 bytes of temporary memory. On a CPU this memory fits the
# cache; on an accelerator (84 MB) the number is large enough to make kernel launches cheap.
_CHUNK_CPU = 1 << 16
_CHUNK_ACCELERATOR = 1 << 22
# Prefixes that torch.compile and activation checkpointing add to parameter names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@torch.no_grad()
def initialise(model: nn.Module, values: Mapping[str, Init], seed: int) -> None:
    """Fill every parameter of `model`, or this rank's part of it, in place.

    Args:
        model: materialised; parameters are plain tensors or DTensors of any placement. A tied parameter is filled
            once, under its first name.
        values: initial value by parameter name; may have more names than a pipeline stage has parameters.

    Raises:
        ValueError: a parameter has no entry in `values`, is on meta, or is a partial sum.
    """
    for name, parameter in model.named_parameters():
        name = plain_name(name)
        if name not in values:
            raise ValueError(f"no initial value is declared for {name}")
        if parameter.is_meta:
            raise ValueError(f"{name} is on meta: materialise it first")
        _fill(parameter, values[name], key(seed, name))


@torch.no_grad()
def fill(model: nn.Module, source: WeightsSource, *, without: Collection[str] = ()) -> None:
    """Copy every parameter of `model` from a source, in place, cast to the parameter's dtype.

    Args:
        model: materialised; parameters are plain tensors or DTensors of any placement. It may be a pipeline stage:
            parameters of other stages are not read.
        source: has the same names and full shapes; a rank reads only its part.
        without: names of parameters that keep their values.
    """
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    source.fill({name: parameter for name, parameter in named.items() if name not in without})


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _fill(parameter: Tensor, init: Init, state: int) -> None:
    if (box := own_box(parameter)) is None:
        return
    local, offsets = box
    if init.kind == "ones":
        local.fill_(1.0)
    elif init.kind == "zeros" or init.std == 0:
        local.zero_()
    elif local.numel():
        strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim())]
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        _fill_box(local, init.std, state + (start + 1) * _GAMMA, strides)


def _fill_box(local: Tensor, std: float, state: int, strides: Sequence[int]) -> None:
    """Fill a box of the full tensor, a bounded number of elements at a time.

    Args:
        local: the box; a scalar counts as a box of one element.
        state: the state of the box's first element.
        strides: strides of the full tensor, in elements.
    """
    if local.dim() == 0:
        local, strides = local.reshape(1), [1]
    chunk = _CHUNK_CPU if local.device.type == "cpu" else _CHUNK_ACCELERATOR
    row = math.prod(local.shape[1:])
    if row > chunk:
        for index in range(local.shape[0]):
            _fill_box(local[index], std, state + index * strides[0] * _GAMMA, strides[1:])
        return
    rows = max(chunk // row, 1)
    # An element's state is a sum over dims; the sum over the inner dims is the same for all rows.
    inner = _steps(local.shape[1:], strides[1:], local.device)
    outer = _steps(local.shape[:1], strides[:1], local.device).add_(_signed(state)).unsqueeze(1)
    for part, part_outer in zip(local.split(rows), outer.split(rows), strict=True):
        part.copy_(_truncated_normal(part_outer + inner, std).view(part.shape))


def _steps(shape: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """γ times the flat index of every element of a box, relative to its first element: int64, [numel]."""
    steps = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in zip(shape, strides, strict=True):
        step = torch.arange(size, dtype=torch.int64, device=device).mul_(_signed(stride * _GAMMA))
        steps = (steps.unsqueeze(1) + step).flatten()
    return steps


def _truncated_normal(state: Tensor, std: float) -> Tensor:
    """Normal values within 3·std from int64 states, which are overwritten: fp32, same shape."""
    scratch = torch.empty_like(state)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(state, shift, out=scratch)
        # The shift of int64 copies the sign bit; SplitMix64 uses unsigned numbers.
        scratch.bitwise_and_((1 << (64 - shift)) - 1)
        state.bitwise_xor_(scratch).mul_(_signed(factor))
    # SplitMix64's last step is left out: it changes only lower bits.
    state.bitwise_right_shift_(40)  # 24 bits with a sign: -2**23 … 2**23 - 1
    cut = math.erf(_CUT / math.sqrt(2))
    # Products and sums are separate operations, so that the result does not depend on fused multiply-add.
    value = state.to(torch.float32).add_(0.5).mul_(cut / (1 << 23))
    return value.erfinv_().mul_(std * math.sqrt(2))


def _signed(number: int) -> int:
    """The int64 with the lower 64 bits of `number`; sums and products of int64 wrap around."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number

"""Measures a machine for the planner: rates of products by shape, times of collectives by size."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlab.techniques.profiler import profilers_schema as names
from titanlab.techniques.profiler.contract import Profiler
from titanlab.techniques.profiler.held import peak_resident_bytes
from titanlab.techniques.profiler.profilers_schema import Rates

# Each figure is the median of this many measurements.
_TIMES = 7
_COLLECTIVE_TIMES = 15
_LAUNCHES = 50
# Elements of the tensor whose copies measure the bandwidth of memory: 64 MiB in float32, more than caches hold.
_COPIED = 2**24
# Elements of the tensor of pointwise operations: 4 MiB in float32, as in a transformer block.
_POINTWISE = 2**20
# Kernels of attention, by the planner's names. _WIDTHS: width of a head by kind of device. _HEADS: number of heads.
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_WIDTHS, _HEADS = {"cpu": 64, "cuda": 128}, 8
# Before the first measurement, products run this many times as long as one figure takes.
_SETTLING = 10
# FLOPs of the backward pass of attention, as a multiple of the forward pass (arXiv 2307.08691, section 2.3).
_BACKWARD = 2.5
# Bytes that the separate kernels of a cast from bfloat16 to float8 move for an element: abs 4, max 2, to float32 6,
# multiply by the scale 8, clamp 8, to float8 5.
_CAST_BYTES = 33
_FLOAT8 = torch.float8_e4m3fn
# Number and width of the linear layers whose host time is measured: so small that the host is the bottleneck. A layer
# and its activation run 2 kernels forward and 3 backward. FSDP2 gathers a layer twice and reduces once.
_LAYERS, _WIDTH = 16, 16
_LAYER_KERNELS, _LAYER_HOOKS = 5, 3
_SMALLEST_MESSAGE = 2**10


class RatesProfiler(Profiler):
    """Measures once before the first step. All ranks measure at the same time; the slowest rank counts."""

    def __init__(self, config: Rates) -> None:
        self._config = config

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        own = {} if on_gpu else {names.PROCESS: float(peak_resident_bytes())}
        with torch.no_grad():
            own.update(_of_device(self._config, device))
            own.update(_of_host(self._config, device))
            own.update(_collectives(self._config, device))
        of_ranks, row = self.links.gather(own), {}
        for name in own:
            # The slowest rank counts: the longest time, the most memory, or the lowest rate.
            is_cost = name.startswith(names.COLLECTIVE) or name in (names.LAUNCH, names.PROCESS, names.HOST, names.HOOK)
            slowest = max if is_cost else min
            row[name] = slowest(figures[name] for figures in of_ranks)
        self.links.report(names.KIND, 0, row, [f"measured {len(row)} rates of this machine"])


def _of_device(config: Rates, device: torch.device) -> dict[str, float]:
    """Measured FLOP/s, bytes/s and seconds of one device, without communication."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device).to(dtype)

    def seconds(call: Callable[[], object]) -> float:
        """Median seconds of a call; makes as many calls as fit into the time for one figure."""
        once = mean_seconds(call, 1, device)
        count = max(1, round(config.seconds / _TIMES / max(once, 1e-7)))
        return statistics.median(mean_seconds(call, count, device) for _ in range(_TIMES))

    # Products [rows, inner] · [inner, columns]: of square matrices, and as in a linear layer.
    side, small = config.largest, max(16, config.largest // 4)
    shapes = [(side // part,) * 3 for part in (8, 4, 2, 1)]
    shapes += [(side, small, 3 * small), (side, 3 * small, small), (small, side, 3 * small)]
    figures = {}
    square = random(side, side)
    settled = time.perf_counter() + _SETTLING * config.seconds
    while time.perf_counter() < settled:
        mean_seconds(partial(torch.matmul, square, square), 1, device)
    for rows, inner, columns in shapes:
        product = partial(torch.matmul, random(rows, inner), random(inner, columns))
        figures[f"{names.PRODUCT} {rows}x{inner}x{columns}"] = 2 * rows * inner * columns / seconds(product)
    q = random(1, _HEADS, max(1, side // 2), _WIDTHS[device.type])
    for name, backend in _KERNELS.items():
        # If the device does not support a kernel, torch warns and raises: leave the kernel out.
        with sdpa_kernel(backend), warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")
            ahead, back = _attention_seconds(q, seconds)
            # Causal attention computes half of the square.
            flops = 2 * q.numel() * q.shape[2]
            figures[f"{names.ATTENTION} {name} forward"] = flops / ahead
            figures[f"{names.ATTENTION} {name} backward"] = _BACKWARD * flops / back
    copied = random(_COPIED)
    target = torch.empty_like(copied)
    # A copy reads and writes each element; a product of two tensors reads two and writes one.
    figures[names.COPY] = 2 * copied.nbytes / seconds(lambda: target.copy_(copied))
    some, other = random(_POINTWISE), random(_POINTWISE)
    figures[names.POINTWISE] = 3 * some.nbytes / seconds(lambda: some * other)
    wide = some.to(torch.bfloat16)
    figures[names.CAST] = _CAST_BYTES * some.numel() / seconds(partial(_cast, wide))
    scalar = random(1)
    figures[names.LAUNCH] = seconds(lambda: [scalar + scalar for _ in range(_LAUNCHES)]) / _LAUNCHES
    return figures


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float8 with one scale, cast as torchao casts outside of compiled code."""
    most = torch.finfo(_FLOAT8).max
    return (tensor.float() * (most / tensor.abs().max().float())).clamp(-most, most).to(_FLOAT8)


def _attention_seconds(q: torch.Tensor, seconds: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass of attention."""
    ahead = seconds(partial(F.scaled_dot_product_attention, q, q, q, is_causal=True))
    with torch.enable_grad():
        query, key, value = (q.clone().requires_grad_() for _ in range(3))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs, given = (query, key, value), torch.ones_like(out)
        return ahead, seconds(partial(torch.autograd.grad, out, inputs, given, retain_graph=True))


def _of_host(config: Rates, device: torch.device) -> dict[str, float]:
    """Seconds of the host for one kernel in eager mode and, with several ranks, for FSDP2's hooks of one collective."""

    def layer_seconds(layers: nn.Module) -> float:
        layers(x).sum().backward()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < _TIMES or time.perf_counter() - begin < config.seconds:
            start = time.perf_counter()
            layers(x).sum().backward()
            times.append((time.perf_counter() - start) / _LAYERS)
            if device.type == "cuda":
                torch.cuda.synchronize()
        return statistics.median(times)

    def linears() -> nn.Module:
        pairs = [(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.SiLU()) for _ in range(_LAYERS)]
        return nn.Sequential(*(module for pair in pairs for module in pair)).to(device)

    with torch.enable_grad():
        x = torch.rand(_WIDTH, _WIDTH, device=device)
        plain = layer_seconds(linears())
        figures = {names.HOST: plain / _LAYER_KERNELS}
        if dist.is_initialized():
            # Imported here, because the import takes a second. Each group has one rank, so that no network time counts.
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(dist.new_subgroups(group_size=1)[0], device.type)
            hooked = linears()
            for layer in (*list(hooked.children())[::2], hooked):
                fully_shard(layer, mesh=mesh)
            hooks = layer_seconds(hooked) - plain
            if hooks > 0:
                figures[names.HOOK] = hooks / _LAYER_HOOKS
    return figures


def mean_seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean seconds of a call: by the device's clock on a GPU, else by the host's."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _collectives(config: Rates, device: torch.device) -> dict[str, float]:
    """Seconds of collectives, by `rates/collective GROUP RANKS KIND BYTES`; BYTES are those of the whole tensor."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    groups = []
    if 1 < local < world and world % local == 0:
        groups.append((names.NODE, dist.new_subgroups(group_size=local)[0]))
    groups.append((names.NODE if local in (0, world) else names.WORLD, dist.group.WORLD))
    figures = {}
    for name, group in groups:
        size = _SMALLEST_MESSAGE
        while size <= config.megabytes * 2**20:
            for kind, seconds in _of_size(size, group, device):
                figures[f"{names.COLLECTIVE} {name} {dist.get_world_size(group)} {kind} {size}"] = seconds
            size *= 4
    return figures


def _of_size(size: int, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[tuple[str, float]]:
    """Kind and seconds of each collective on a float32 tensor of `size` bytes."""
    ranks = dist.get_world_size(group)
    elements = max(1, size // 4 // ranks) * ranks
    whole = torch.rand(elements, device=device)
    parts = list(torch.empty_like(whole).chunk(ranks))
    own, received = whole[: elements // ranks].clone(), torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(received, group=group),
        "all_gather": lambda: dist.all_gather(parts, own, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
    }
    for kind, call in calls.items():
        received.copy_(whole)
        times = []
        for _ in range(_COLLECTIVE_TIMES):
            # Ranks begin together: the time of a collective must not include waiting for a later rank.
            dist.barrier(group=group)
            times.append(mean_seconds(call, 1, device))
        yield kind, statistics.median(times[1:])

"""Sums a step's totals over all ranks in one reduction: loss, norm, flags, load of experts. Compares ranks' times.

Routers count the tokens of experts in the backward pass (`titanlab.techniques.model.mixture_of_experts`). The step's
only reduction also sums the counts, so every rank knows the counts of all blocks and computes the same biases
(arXiv 2408.15664).

Every rank measures two phases of its steps. `data` is the time in which it waits for its batch. `compute` is the time
in which its threads compute in forward and backward, or wait for a core; with a GPU only the host's time counts.
Neither phase includes waiting for other ranks, so a rank for which others wait stands out. Only ranks of the same
pipeline stage are compared: another stage has other layers.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs import BLOCKS, MEMORY_MOST, MEMORY_MOST_RANK, ModelAccount, block_name, hardware, meter
from titanlab.distributed import STOP_SIGNALS, World
from titanlab.errors import DamagedPosition
from titanlab.recipe import Cluster
from titanlab.system import trimmed
from titanlab.techniques.model.mixture_of_experts import Auxiliary, Router
from titanlab.techniques.precision.cast import LossScale, ScaledStep
from titanlab.techniques.profiler.held import peak_resident_bytes

STOPS = tuple(map(int, STOP_SIGNALS))


class Load(NamedTuple):
    """The routing of a step, over all ranks.

    counts: for each transformer block and each of its experts, the number of tokens that the expert has computed
    entropies: for each transformer block, the entropy of the router's probabilities summed over tokens, in nats
    active: number of experts that compute each token
    """

    counts: Sequence[Sequence[float]]
    entropies: Sequence[float]
    active: int

    @property
    def most(self) -> float:
        """The highest load of an expert: its tokens, divided by the mean over the experts of its transformer block."""
        return max(max(block) * len(block) / max(sum(block), 1.0) for block in self.counts)

    @property
    def entropy(self) -> float:
        """Entropy of a router's probabilities in nats: the mean over tokens and transformer blocks."""
        tokens = sum(map(sum, self.counts)) / self.active
        return sum(self.entropies) / max(tokens, 1.0)


class Totals(NamedTuple):
    """The results of a step over all ranks, the same on every rank.

    loss: mean cross-entropy over the valid labels, in nats
    grad_norm: norm of the gradient of that loss, before clipping
    stop: the largest number of a signal that a rank has received, or 0
    scaled: loss scale and skipped steps; None if the loss is not scaled and no step can be skipped
    saves: whether rank 0 asks for a checkpoint
    load: load of the experts; None: the model has no experts
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: int
    scaled: ScaledStep | None = None
    saves: bool = False
    load: Load | None = None

    @property
    def finite(self) -> bool:
        """False if loss or norm is NaN or infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def lost(self) -> bool:
        """True if loss or norm is not finite and the run cannot recover."""
        if self.scaled is not None and self.scaled.forgiven:
            return False
        tolerated = self.scaled is not None and self.scaled.tolerated
        return not math.isfinite(self.loss) or not (math.isfinite(self.grad_norm) or tolerated)


def routers_of(model: nn.Module) -> dict[int, Router]:
    """The routers of a model or a stage, by the number of their block."""
    return {
        int(layer): module
        for layer, block in model.get_submodule(BLOCKS).named_children()
        for module in block.modules()
        if isinstance(module, Router)
    }


def set_biases(model: nn.Module, biases: Mapping[str, Sequence[float]]) -> None:
    """Give routers the biases of a checkpoint, so that they choose as in training and evaluation.

    Args:
        biases: by transformer block, as `Balance.state` returns them; empty: the routers have no biases.
    """
    for layer, router in routers_of(model).items() if biases else ():
        router.bias = torch.tensor(biases[block_name(layer)], dtype=torch.float32, device=router.weight.device)


class Balance:
    """Counts the tokens of a model's experts and balances their load; does nothing for a model without experts.

    Args:
        counts: whether this rank's counts are summed; of the ranks that route the same tokens, one counts.
        parts: number of ranks that route the same tokens.
        scale: the loss is multiplied by it before the backward pass.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        account: ModelAccount,
        device: torch.device,
        *,
        counts: bool,
        parts: int,
        scale: float | Tensor,
        seq_len: int,
    ) -> None:
        experts = account.experts
        self._counts, self._kind = counts, "none" if experts is None else experts.balance
        self._rate, self._active = (0.0, 0) if experts is None else (experts.bias_rate, experts.active)
        shape = (0, 0) if experts is None else (account.layers, experts.count)
        self._initial = 1 / shape[1] if self._kind == "auxiliary_batch" else 0.0
        # For each transformer block and expert: the expert's bias, or its share of the last step's tokens.
        self._values = torch.full(shape, self._initial, dtype=torch.float32, device=device)
        self._routers: dict[int, Router] = {}
        if experts is None:
            return
        self._routers = {layer: router for model in models for layer, router in routers_of(model).items()}
        for layer, router in self._routers.items():
            router.tally = torch.zeros(experts.count + 1, dtype=torch.float32, device=device, requires_grad=True)
            if self._kind == "bias":
                router.bias = self._values[layer]
            if self._kind.startswith("auxiliary"):
                router.auxiliary = Auxiliary(
                    shares=self._values[layer] if self._kind == "auxiliary_batch" else None,
                    weight=experts.auxiliary_weight / parts,
                    scale=scale,
                    seq_len=seq_len,
                )

    def begin(self) -> None:
        """Start to count from zero; called before the first microbatch of a step."""
        for router in self._routers.values():
            assert router.tally is not None
            router.tally.grad = None

    def sums(self) -> Tensor:
        """This rank's counts and entropies of a step, to be summed over ranks: [layers · (experts + 1)] float64."""
        layers, experts = self._values.shape
        rows = torch.zeros((layers, experts + 1), dtype=torch.float64, device=self._values.device)
        for layer, router in self._routers.items():
            assert router.tally is not None
            if self._counts and router.tally.grad is not None:
                rows[layer] = router.tally.grad
        return rows.flatten()

    @torch.no_grad()
    def learn(self, sums: Tensor) -> None:
        """Compute new biases or shares from the sums over all ranks."""
        if self._kind not in ("bias", "auxiliary_batch"):
            return
        counts = sums.view(self._values.shape[0], -1)[:, :-1]
        if self._kind == "bias":
            missing = counts.mean(1, keepdim=True) - counts
            self._values.add_(missing.sign().float(), alpha=self._rate)
        else:
            self._values.copy_(counts / counts.sum(1, keepdim=True).clamp(min=1.0))

    def load(self, sums: Sequence[float]) -> Load | None:
        """The load of experts from the sums over all ranks; None if the model has no experts."""
        width = self._values.shape[1] + 1
        rows = [sums[start : start + width] for start in range(0, len(sums), width)]
        return Load([row[:-1] for row in rows], [row[-1] for row in rows], self._active) if rows else None

    def state(self) -> dict[str, list[float]]:
        """The state for a checkpoint: for each transformer block, the experts' biases or shares."""
        if self._kind not in ("bias", "auxiliary_batch"):
            return {}
        return {block_name(layer): values for layer, values in enumerate(self._values.tolist())}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint's state; if it is empty, use the initial biases or shares."""
        if not state or not self.state():
            self._values.fill_(self._initial)
            return
        for layer, values in enumerate(self._values):
            known = state.get(block_name(layer), ())
            if len(known) != len(values):
                rule = f"has {len(known)} numbers, and block {layer} has {len(values)} experts"
                cure = "choose the model that it was trained as"
                raise DamagedPosition(f"routing.{block_name(layer)}", list(known), rule, cure)
            values.copy_(torch.tensor(known, dtype=torch.float32))


class Reduction:
    """A step's totals on the device.

    Reading totals waits for the device. On a GPU the loop therefore reads them a step later, without waiting.
    """

    def __init__(
        self,
        world: World,
        *,
        squared_norm: Tensor,
        loss_sum: Tensor,
        tokens: int,
        stop: int,
        nominal_tokens: int,
        loss_scale: LossScale | None = None,
        saves: bool | None = None,
        balance: Balance | None = None,
    ) -> None:
        """Sum this rank's values over all ranks; all ranks call it.

        Args:
            squared_norm: this rank's share of the squared norm of the gradients of
                loss_sum / nominal_tokens, times the scale of the loss.
            nominal_tokens: labels of a step in which all are valid.
            loss_scale: gets the norm; None: the loss was not scaled.
            saves: whether this rank asks for a checkpoint; None (then on all ranks): no rank can ask.
            balance: gives this rank's counts of experts' tokens, and gets the sums over ranks; None: no experts.
        """
        device, loss_scale = loss_sum.device, loss_scale or LossScale()
        # One element per signal, so that a sum over ranks shows which signals were received.
        flags = [float(stop == number) for number in STOPS]
        self._asks = saves is not None
        if saves is not None:
            flags.append(float(saves))
        host_values = torch.tensor([float(tokens), *flags], dtype=torch.float64)
        if device.type == "cuda":
            host_values = host_values.pin_memory().to(device, non_blocking=True)
        # Gradients that are offloaded to the CPU have their norm there.
        parts = [torch.stack([squared_norm.to(device), loss_sum.double()]), host_values]
        self._balance, self._count = balance, 0
        if balance is not None:
            parts.append(balance.sums().to(device))
            self._count = parts[-1].numel()
        sums = world.sum(torch.cat(parts))
        sums, counts = sums[: sums.numel() - self._count], sums[sums.numel() - self._count :]
        if balance is not None:
            balance.learn(counts)
        self._correction = loss_scale.unscaled(nominal_tokens / sums[2])
        self._norm = sums[0].sqrt() * self._correction
        loss_scale.learn_loss(sums[1])
        # A loss that is not finite makes the step bad, too.
        scaled = loss_scale.judge(torch.where(sums[1].isfinite(), self._norm, math.nan))
        values = [torch.stack([sums[1] / sums[2], self._norm]), sums[2:], *([] if scaled is None else [scaled]), counts]
        self._values = torch.cat(values)
        # When this event has happened, the totals of a GPU are on the host; None on a CPU.
        self.arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._values = self._values.to("cpu", non_blocking=True)
            self.arrived = torch.cuda.Event(enable_timing=True)
            self.arrived.record()

    def gradient_factor(self, max_norm: float | None) -> Tensor | None:
        """The factor for the gradients: correction for ignored labels and the loss scale, and clipping.

        None if the host knows, without waiting for the device, that the factor is 1.
        """
        factor = self._correction
        if max_norm is not None:
            # The small number keeps a zero norm finite, as in torch.nn.utils.clip_grad_norm_.
            factor = factor * (max_norm / (self._norm + 1e-6)).clamp(max=1.0)
        return None if self.arrived is None and factor == 1.0 else factor

    def read(self) -> Totals:
        """The totals as numbers; waits until they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, tokens, *rest = self._values.tolist()
        rest, counts = rest[: len(rest) - self._count], rest[len(rest) - self._count :]
        load = None if self._balance is None else self._balance.load(counts)
        flags, rest = rest[: len(STOPS)], rest[len(STOPS) :]
        saves = self._asks and rest.pop(0) > 0
        stop = max((number for number, count in zip(STOPS, flags, strict=True) if count), default=0)
        scaled = None
        if rest:
            scale, skipped, *judged = rest
            scaled = ScaledStep(scale, int(skipped), *map(bool, judged))
        return Totals(loss, norm, int(tokens), stop, scaled, saves, load)


SLOWEST, SLOWER, DATA, COMPUTE = "straggler/rank", "straggler/slower(%)", "straggler/data(s)", "straggler/compute(s)"
# A rank is reported if its time exceeds _RATIO times the median, and the excess is above _SHARE of the steps' time and
# above _SECONDS. A smaller excess in a few short steps comes from other programs on the host.
_RATIO, _SHARE, _SECONDS = 1.5, 0.1, 0.25
_PHASES = ("data", "forward and backward")
_COMPUTE = 1


class RankTimes:
    """Measures the times of this rank, and compares those of all ranks every few steps.

    Args:
        every: steps between two comparisons; 0: compare only once, after the last step.
        pipeline: degree of the pipeline; the ranks of one stage have consecutive numbers.
    """

    def __init__(
        self, every: int, world: World, *, pipeline: int, report: Callable[[Mapping[str, float], str], None]
    ) -> None:
        self._every, self._world, self._report = every, world, report
        # If each stage has only one rank, ranks of different stages are compared.
        self._alone = pipeline == world.world
        self._peers = world.world if self._alone else world.world // pipeline
        self._is_cpu = world.device.type == "cpu"
        self._steps, self._begin = 0, time.monotonic()
        self._data = self._compute = 0.0
        self._warned: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context for `with`, in which the rank waits for its batch."""
        begin = time.monotonic()
        yield
        self._data += time.monotonic() - begin

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which the rank runs forward and backward."""
        if self._world.world == 1:
            # There is no other rank to compare with, and reading the clocks takes 5 % of a step of a tiny model.
            yield
            return
        begin = self._clock()
        yield
        self._compute += self._clock() - begin

    def after_step(self, step: int, *, last: bool) -> None:
        """Compare the ranks if this step is due for a comparison; all ranks call it."""
        self._steps += 1
        if self._steps == 1:
            # Leave out the first step: its compilation and first collectives say nothing about later steps.
            self._restart()
        elif self._world.world > 1 and (last or (self._every and step % self._every == 0)):
            self._compare(step)
            self._restart()

    def _compare(self, step: int) -> None:
        own = [self._data, self._compute, peak_memory_gib(self._world.device), time.monotonic() - self._begin]
        table = torch.zeros(self._world.world, len(own), dtype=torch.float64)
        table[self._world.rank] = torch.tensor(own, dtype=torch.float64)
        rows = self._world.sum(table).tolist()
        if self._world.logs:
            steps = max(1, self._steps - 1)
            metrics, slow = compared(rows, steps, peers=self._peers)
            # Warn only once for each rank and phase; the metrics show a slow rank after every comparison.
            is_new = slow is not None and slow not in self._warned
            if slow is not None:
                self._warned.add(slow)
            text = ""
            if slow is not None and is_new:
                text = (
                    f"step {step}: rank {int(metrics[SLOWEST])} is slow in {_PHASES[slow[1]]}: a step takes it "
                    f"{trimmed(metrics[DATA])} s for data and {trimmed(metrics[COMPUTE])} s of computing, "
                    f"{metrics[SLOWER]:.0f}% more than the others"
                )
                if self._alone and slow[1] == _COMPUTE:
                    text += ", which have other layers (parallelism.split)"
            self._report(metrics, text)

    def _restart(self) -> None:
        self._steps, self._begin, self._data, self._compute = 1, time.monotonic(), 0.0, 0.0

    def _clock(self) -> float:
        if not self._is_cpu:
            return time.monotonic()
        # Count CPU time of all threads: waiting in a collective takes none. Add the time of waiting for a core.
        return time.process_time() + _queued_seconds()


def compared(rows: list[list[float]], steps: int, *, peers: int) -> tuple[dict[str, float], tuple[int, int] | None]:
    """The metrics of a comparison, and the slow rank with its slow phase; None if no rank is slow.

    Args:
        rows: for each rank: seconds of data, seconds of compute, GiB of memory, seconds of all steps.
        peers: ranks are compared in groups of this many consecutive ranks.
    """
    busy = [data + compute for data, compute, *_ in rows]
    groups = [range(first, first + peers) for first in range(0, len(rows), peers)]
    # For each rank, the median time of its peers without the rank itself.
    usual = [
        statistics.median([busy[peer] for peer in group if peer != rank] or [busy[rank]])
        for group in groups
        for rank in group
    ]
    slowest = max(range(len(rows)), key=lambda rank: busy[rank] - usual[rank])
    median = max(usual[slowest], 1e-9)
    memory = max(range(len(rows)), key=lambda rank: rows[rank][2])
    metrics = {
        SLOWEST: slowest,
        SLOWER: 100 * (busy[slowest] / median - 1),
        DATA: rows[slowest][0] / steps,
        COMPUTE: rows[slowest][1] / steps,
        MEMORY_MOST: rows[memory][2],
        MEMORY_MOST_RANK: memory,
    }
    excess = busy[slowest] - median
    if not (busy[slowest] > _RATIO * median and excess > max(_SHARE * rows[slowest][3], _SECONDS)):
        return metrics, None
    group = groups[slowest // peers]
    by_phase = [
        rows[slowest][phase] - statistics.median(rows[peer][phase] for peer in group) for phase in range(len(_PHASES))
    ]
    return metrics, (slowest, by_phase.index(max(by_phase)))


def _queued_seconds() -> float:
    """Seconds for which the main thread has waited for a core; 0 if the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def memory(device: torch.device) -> dict[str, object]:
    """Metrics of peak memory so far: the allocator's on a GPU, the process's resident memory on a CPU."""
    if device.type != "cuda":
        return {"memory/max_resident(GiB)": peak_memory_gib(device)}
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        meter.MEMORY_ACTIVE: active / 2**30,
        "memory/max_active(%)": 100 * active / total,
        meter.MEMORY_RESERVED: reserved / 2**30,
        "memory/max_reserved(%)": 100 * reserved / total,
        "memory/num_alloc_retries": stats["num_alloc_retries"],
        "memory/num_ooms": stats["num_ooms"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank in GiB: reserved by the allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return peak_resident_bytes() / 2**30


_MATMUL_SIZE = 512
_MATMUL_SECONDS = 0.05


def peak_flops(cluster: Cluster, device: torch.device, compute: torch.dtype) -> tuple[float | None, str]:
    """Peak FLOP/s of one device in the given dtype, and the source of the figure.

    The recipe's figure comes first, then the datasheet's. On CPU a short matrix product is timed instead. None for
    an accelerator that is not in the table.
    """
    if cluster.peak_tflops is not None:
        return cluster.peak_tflops * 1e12, "cluster.peak_tflops"
    if device.type == "cpu":
        return _measured(compute), f"{_MATMUL_SIZE}³ matmul measured on this CPU"
    return hardware.peak_flops(str(cluster.device), str(compute).removeprefix("torch.")), f"{cluster.device}, dense"


def _measured(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products of square matrices, with the run's number of threads.

    Measures the CPU time of this thread, which takes part in each product: unlike wall time it does not grow when
    other processes, such as the run's other ranks, share the cores.
    """
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    best = float("inf")
    end = time.thread_time() + _MATMUL_SECONDS
    while time.thread_time() < end or best == float("inf"):
        start = time.thread_time()
        torch.mm(a, a)
        best = min(best, time.thread_time() - start)
    flops: float = 2 * _MATMUL_SIZE**3 / best
    return flops

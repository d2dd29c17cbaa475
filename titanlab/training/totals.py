"""A step's totals: one reduction over all ranks for loss, norm and flags."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from titanlab.distributed.stop import STOP_SIGNALS
from titanlab.distributed.world import World
from titanlab.precision.loss_scale import LossScale, ScaledStep
from titanlab.training.balance import Load, NoBalance

STOPS = tuple(map(int, STOP_SIGNALS))


class Totals(NamedTuple):
    """The results of a step over all ranks, the same on every rank.

    loss: mean cross-entropy over the valid labels, in nats
    grad_norm: norm of the gradient of that loss, before clipping
    tokens: number of valid labels of the step
    stop: the largest signal that a rank has received, or 0
    scaled: loss scale and skipped steps; None if the precision does not scale the loss
    saves: whether rank 0 asks for a checkpoint
    load: of experts; None: the model has none
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


class Reduction:
    """Totals on the device.

    Reading them waits for the device; on a GPU the loop therefore reads them a step later, without waiting.
    """

    def __init__(
        self,
        world: World,
        *,
        squared_norm: torch.Tensor,
        loss_sum: torch.Tensor,
        tokens: int,
        stop: int,
        nominal_tokens: int,
        loss_scale: LossScale | None = None,
        saves: bool | None = None,
        balance: NoBalance | None = None,
    ) -> None:
        """Sum over ranks.

        Args:
            squared_norm: this rank's share of the squared norm of the gradients of
                loss_sum / nominal_tokens, times the scale of the loss.
            loss_sum: this rank's loss, summed over its valid labels.
            nominal_tokens: labels of a step in which all are valid.
            loss_scale: gets the norm; None: the loss was not scaled.
            saves: whether this rank asks for a checkpoint; None on all ranks: no rank asks.
            balance: has this rank's counts of experts' tokens, and gets those of all ranks.
        """
        device = loss_sum.device
        # One element per signal, so that a sum over ranks shows which signals were received.
        flags = [float(stop == number) for number in STOPS]
        self._asks = saves is not None
        if saves is not None:
            flags.append(float(saves))
        host_values = torch.tensor([float(tokens), *flags], dtype=torch.float64)
        if device.type == "cuda":
            host_values = host_values.pin_memory().to(device, non_blocking=True)
        # The norm of offloaded gradients is on the host.
        device_values = torch.stack([squared_norm.to(device), loss_sum.double()])
        self._balance = balance or NoBalance()
        counts = self._balance.sums()
        self._counts = 0 if counts is None else counts.numel()
        parts = [device_values, host_values, *([] if counts is None else [counts.to(device)])]
        sums = world.sum(torch.cat(parts))
        if counts is not None:
            sums, counts = sums[: -self._counts], sums[-self._counts :]
            self._balance.learn(counts)
        loss_scale = loss_scale or LossScale()
        self._correction = loss_scale.unscaled(nominal_tokens / sums[2])
        self._norm = sums[0].sqrt() * self._correction
        loss_scale.learn_loss(sums[1])
        # A loss that is not finite makes the step a bad one too.
        scaled = loss_scale.judge(torch.where(sums[1].isfinite(), self._norm, math.nan))
        values = [torch.stack([sums[1] / sums[2], self._norm]), sums[2:]]
        values += [] if scaled is None else [scaled]
        self._values = torch.cat(values if counts is None else [*values, counts])
        if device.type == "cuda":
            self._values = self._values.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event(enable_timing=True)
            self._arrived.record()
        self._exact = device.type == "cpu"

    @property
    def arrived(self) -> torch.cuda.Event | None:
        """The event after which a GPU's totals are on the host; None on a CPU, which computes them there."""
        return None if self._exact else self._arrived

    def gradient_factor(self, max_norm: float | None) -> torch.Tensor | None:
        """The factor for the gradients: correction for ignored labels and the loss scale, and clipping.

        None if it is known to be 1 without waiting for the device.
        """
        factor = self._correction
        if max_norm is not None:
            # The small number keeps a zero norm finite, as in torch.nn.utils.clip_grad_norm_.
            factor = factor * (max_norm / (self._norm + 1e-6)).clamp(max=1.0)
        return None if self._exact and factor == 1.0 else factor

    def read(self) -> Totals:
        """The totals as numbers; waits until they have arrived."""
        if not self._exact:
            self._arrived.synchronize()
        loss, norm, tokens, *rest = self._values.tolist()
        load = self._balance.load(rest[len(rest) - self._counts :])
        rest = rest[: len(rest) - self._counts]
        flags, rest = rest[: len(STOPS)], rest[len(STOPS) :]
        saves = self._asks and rest.pop(0) > 0
        stop = max((number for number, count in zip(STOPS, flags, strict=True) if count), default=0)
        if not rest:
            return Totals(loss, norm, int(tokens), stop, saves=saves, load=load)
        scale, skipped, *judged = rest
        return Totals(loss, norm, int(tokens), stop, ScaledStep(scale, int(skipped), *map(bool, judged)), saves, load)

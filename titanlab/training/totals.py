"""A step's totals: the one reduction over all ranks that a step makes for loss, norm and flags."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from titanlab.distributed.stop import STOP_SIGNALS
from titanlab.distributed.world import World
from titanlab.precision.loss_scale import LossScale, ScaledStep

STOPS = tuple(map(int, STOP_SIGNALS))


class Totals(NamedTuple):
    """What all ranks know of a step once it is over.

    loss: mean cross-entropy over the valid labels, in nats
    grad_norm: norm of the gradient of that loss, before clipping
    tokens: valid labels of the step
    stop: the signal that any rank has received (the largest of several), or 0
    scaled: of a precision that scales its loss: by how much, and what came of it
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: int
    scaled: ScaledStep | None = None

    @property
    def finite(self) -> bool:
        """False if loss or norm is NaN or infinite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def lost(self) -> bool:
        """True if no later step can make good what is not finite."""
        tolerated = self.scaled is not None and self.scaled.tolerated
        return not math.isfinite(self.loss) or not (math.isfinite(self.grad_norm) or tolerated)


class Reduction:
    """Totals that are still on the device.

    Reading them waits for the device; on a GPU the loop therefore reads them a step later, when they
    have long arrived.
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
    ) -> None:
        """Sum over ranks.

        Args:
            squared_norm: this rank's share of the squared norm of the gradients of
                loss_sum / nominal_tokens, times the scale of the loss.
            loss_sum: this rank's loss, summed over its valid labels.
            nominal_tokens: labels of a step in which all are valid.
            loss_scale: is told the norm; None: nothing was scaled.
        """
        device = loss_sum.device
        # One place a signal, so that a sum over ranks tells which were received.
        flags = [float(stop == number) for number in STOPS]
        known = torch.tensor([float(tokens), *flags], dtype=torch.float64)
        if device.type == "cuda":
            known = known.pin_memory().to(device, non_blocking=True)
        # Gradients that are offloaded have their norm on the host.
        measured = torch.stack([squared_norm.to(device), loss_sum.double()])
        sums = world.sum(torch.cat([measured, known]))
        loss_scale = loss_scale or LossScale()
        self._correction = loss_scale.unscaled(nominal_tokens / sums[2])
        self._norm = sums[0].sqrt() * self._correction
        scaled = loss_scale.judge(self._norm)
        values = [torch.stack([sums[1] / sums[2], self._norm]), sums[2:]]
        self._values = torch.cat(values if scaled is None else [*values, scaled])
        if device.type == "cuda":
            self._values = self._values.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._exact = device.type == "cpu"

    def gradient_factor(self, max_norm: float | None) -> torch.Tensor | None:
        """What to multiply the gradients by: the correction for labels that do not count and the scale, and clipping.

        Returns None where it is known without waiting that nothing changes.
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
        flags, scaled = rest[: len(STOPS)], rest[len(STOPS) :]
        stop = max((number for number, count in zip(STOPS, flags, strict=True) if count), default=0)
        if not scaled:
            return Totals(loss, norm, int(tokens), stop)
        scale, skipped, tolerated = scaled
        return Totals(loss, norm, int(tokens), stop, ScaledStep(scale, int(skipped), bool(tolerated)))

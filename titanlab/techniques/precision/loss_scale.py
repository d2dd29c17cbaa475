"""The loss scale: it keeps gradients in the range of a dtype, and skips the update of a step with an overflow.

All ranks decide by the norm of the full gradient, which is reduced over all ranks, so an overflow on one rank is an
overflow on all. They decide on the device, so that the host does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class ScaledStep(NamedTuple):
    """The loss scale in one step.

    scale: factor of the loss
    skipped: number of steps without an update so far, this one included
    tolerated: whether the run may continue if the gradients were not finite
    forgiven: whether it may continue if the loss was not finite either
    """

    scale: float
    skipped: int
    tolerated: bool
    forgiven: bool = False


class LossScale:
    """No scale: every step updates. The default of every precision."""

    def multiplier(self, constant: float) -> float | Tensor:
        """The factor of a loss before its backward: constant · scale. Call once: a tensor is updated in place."""
        return constant

    def unscaled(self, tensor: Tensor) -> Tensor:
        """A norm of this step's scaled gradients, divided by the scale."""
        return tensor

    def learn_loss(self, loss: Tensor) -> None:
        """Take the step's loss over all ranks; called before `judge`."""

    def judge(self, norm: Tensor) -> Tensor | None:
        """Decide from the norm of the unscaled gradients; returns the fields of a `ScaledStep`: [3] on the device."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters, or skip the update as decided, and adapt the scale."""
        optimizer.step()

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state; one without a scale changes nothing."""


class DynamicLossScale(LossScale):
    """A scale that shrinks after an overflow and grows after many steps without one (arXiv 1710.03740, 3.2)."""

    def __init__(
        self,
        *,
        device: torch.device,
        init_scale: float,
        growth_factor: float,
        growth_interval: int,
        backoff_factor: float,
        min_scale: float,
        max_skips: int,
    ) -> None:
        self._growth_factor, self._growth_interval = growth_factor, growth_interval
        self._backoff_factor, self._min_scale, self._max_skips = backoff_factor, min_scale, max_skips
        self._scale = torch.tensor(init_scale, dtype=torch.float32, device=device)
        # Steps since the last change or skip; steps skipped in a row; all skipped steps.
        self._good, self._row, self._skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._multipliers: list[tuple[float, Tensor]] = []

    def multiplier(self, constant: float) -> Tensor:
        product = self._scale * constant
        self._multipliers.append((constant, product))
        return product

    def unscaled(self, tensor: Tensor) -> Tensor:
        return tensor / self._scale

    def judge(self, norm: Tensor) -> Tensor:
        self._finite = norm.isfinite()
        self._row = torch.where(self._finite, 0, self._row + 1)
        self._skipped = torch.where(self._finite, self._skipped, self._skipped + 1)
        tolerated = (self._scale > self._min_scale) & (self._row < self._max_skips)
        return torch.stack([self._scale.double(), self._skipped.double(), tolerated.double()])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        step_if(optimizer, self._finite)
        self._good = torch.where(self._finite, self._good + 1, 0)
        grows = self._good >= self._growth_interval
        grown = self._scale * self._growth_factor
        # The scale does not grow beyond the range of float32.
        kept = torch.where(grows & grown.isfinite(), grown, self._scale)
        shrunk = (self._scale * self._backoff_factor).clamp(min=self._min_scale)
        self._scale = torch.where(self._finite, kept, shrunk)
        self._good = torch.where(grows, 0, self._good)
        self._refresh()

    def state(self) -> dict[str, float]:
        tensors = {"scale": self._scale, "good": self._good, "row": self._row, "skipped": self._skipped}
        return {name: tensor.item() for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        # A checkpoint of another precision has no scale, but perhaps counts of bad steps.
        if "scale" not in state:
            return
        self._scale = torch.full_like(self._scale, state["scale"])
        self._good, self._row, self._skipped = (
            torch.full_like(self._good, int(state.get(name, 0))) for name in ("good", "row", "skipped")
        )
        self._refresh()

    def _refresh(self) -> None:
        for constant, product in self._multipliers:
            torch.mul(self._scale, constant, out=product)


def step_if(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Take a step if a flag on the device is true.

    The kernels of torch's fused Adam and AdamW read such a flag, as torch.amp.GradScaler sets it; for other optimizers
    the host waits for the flag. (Fused SGD reads it too, but if the first step is skipped, `_fused_sgd` of torch 2.13
    uses a momentum buffer that was never written.)
    """
    reads_flag = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and optimizer.defaults["fused"]
    if not reads_flag:
        if finite:
            optimizer.step()
        return
    first = optimizer.param_groups[0]["params"][0]
    # Offloaded parameters are updated on the host, so the flag is copied there.
    flags = {"found_inf": (~finite).to(first.device, torch.float32), "grad_scale": None}
    for name, flag in flags.items():
        setattr(optimizer, name, flag)
    try:
        optimizer.step()
    finally:
        for name in flags:
            delattr(optimizer, name)

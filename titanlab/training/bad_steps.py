"""Bad steps: the update of a step whose loss or gradient is not finite is skipped, on all ranks.

The flag is computed on the device from totals that are reduced over all ranks. Fused Adam and AdamW read it there; for
another optimizer the host waits for it once a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from titanlab.precision.loss_scale import LossScale, step_if
from titanlab.recipe.training_schema import Training

_ROW, _SKIPPED = "bad_row", "bad_skipped"


def with_policy(loss_scale: LossScale, training: Training, device: torch.device) -> LossScale:
    """The loss scale, which also skips bad steps if the recipe says so."""
    if training.on_nan != "skip":
        return loss_scale
    return SkipBadSteps(loss_scale, limit=training.nan_limit, device=device)


class SkipBadSteps(LossScale):
    """A loss scale that takes no step if the gradient is not finite, up to `limit` times in a row.

    An overflow that the precision's own loss scale tolerates is no bad step, if the loss is finite: it is skipped as
    before, and not counted.
    """

    def __init__(self, inner: LossScale, *, limit: int, device: torch.device) -> None:
        self._inner, self._limit = inner, limit
        self._row, self._skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._is_lost = torch.zeros((), dtype=torch.bool, device=device)
        self._inner_skips = False

    def multiplier(self, constant: float) -> float | Tensor:
        return self._inner.multiplier(constant)

    def unscaled(self, tensor: Tensor) -> Tensor:
        return self._inner.unscaled(tensor)

    def learn_loss(self, loss: Tensor) -> None:
        self._inner.learn_loss(loss)
        self._is_lost = ~loss.isfinite()

    def judge(self, norm: Tensor) -> Tensor:
        fields, finite = self._inner.judge(norm), norm.isfinite()
        self._inner_skips = fields is not None
        if fields is None:
            fields = torch.tensor([math.nan, 0.0, 0.0], dtype=torch.float64, device=norm.device)
        # A smaller scale mends an overflow of gradients, and no loss.
        self._bad = ~finite & ((fields[2] == 0) | self._is_lost)
        self._row = torch.where(self._bad, self._row + 1, torch.where(finite, 0, self._row))
        self._skipped = self._skipped + self._bad
        skipped = fields[1] if self._inner_skips else self._skipped.double()
        return torch.stack([fields[0], skipped, fields[2], (self._row <= self._limit).double()])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._inner_skips:
            self._inner.step(optimizer)
        else:
            step_if(optimizer, ~self._bad)

    def state(self) -> dict[str, float]:
        return {**self._inner.state(), _ROW: self._row.item(), _SKIPPED: self._skipped.item()}

    def restore(self, state: Mapping[str, float]) -> None:
        self._inner.restore({name: value for name, value in state.items() if name not in (_ROW, _SKIPPED)})
        self._row = torch.full_like(self._row, int(state.get(_ROW, 0)))
        self._skipped = torch.full_like(self._skipped, int(state.get(_SKIPPED, 0)))

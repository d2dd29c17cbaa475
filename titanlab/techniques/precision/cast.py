"""Precisions that only cast (FSDP2 casts parameters when it gathers them), casts around float32 parts, loss scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs import ModelAccount, is_in_block
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.techniques.precision.contract import Formats, matched


class ScaledStep(NamedTuple):
    """The loss scale in one step.

    scale: factor of the loss
    skipped: number of steps without an update so far, this one included
    tolerated: whether the run may continue if the gradients were not finite
    forgiven: whether the run may continue if the loss was not finite either
    """

    scale: float
    skipped: int
    tolerated: bool
    forgiven: bool = False


class LossScale:
    """The default of every precision: no scale, and every step updates the parameters.

    A subclass with a scale keeps gradients in the range of a dtype, and skips the update of a step with an overflow.
    All ranks decide by the norm of the full gradient, which is reduced over all ranks, so an overflow on one rank is an
    overflow on all. They decide on the device, so that the host does not wait.
    """

    def multiplier(self, constant: float) -> float | Tensor:
        """The factor of a loss, constant · scale. Call once: a returned tensor follows changes of the scale."""
        return constant

    def unscaled(self, tensor: Tensor) -> Tensor:
        """A norm of this step's scaled gradients, divided by the scale."""
        return tensor

    def learn_loss(self, loss: Tensor) -> None:
        """Take the step's loss over all ranks; called before `judge`."""

    def judge(self, norm: Tensor) -> Tensor | None:
        """Decide from the unscaled gradients' norm whether to update; returns [scale, skipped, tolerated] or None."""
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters, or skip the update as decided, and adapt the scale."""
        optimizer.step()

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's state; a state without a scale changes nothing."""


class DynamicLossScale(LossScale):
    """A scale that shrinks after an overflow and grows after many steps without one (arXiv 1710.03740, 3.2)."""

    def __init__(self, config: Fp16, device: torch.device) -> None:
        self._config = config
        # With dynamic=false the scale is constant: factors of 1, no minimum.
        self._growth, self._backoff = (config.growth_factor, config.backoff_factor) if config.dynamic else (1.0, 1.0)
        self._least = config.min_scale if config.dynamic else 0.0
        self._scale = torch.tensor(config.init_scale, dtype=torch.float32, device=device)
        # _good: steps since the last change or skip; _row: steps skipped in a row; _skipped: all skipped steps.
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
        tolerated = (self._scale > self._least) & (self._row < self._config.max_skips)
        return torch.stack([self._scale.double(), self._skipped.double(), tolerated.double()])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        step_if(optimizer, self._finite)
        self._good = torch.where(self._finite, self._good + 1, 0)
        grows = self._good >= self._config.growth_interval
        grown = self._scale * self._growth
        # The scale does not grow beyond the range of float32.
        kept = torch.where(grows & grown.isfinite(), grown, self._scale)
        shrunk = (self._scale * self._backoff).clamp(min=self._least)
        self._scale = torch.where(self._finite, kept, shrunk)
        self._good = torch.where(grows, 0, self._good)
        self._refresh()

    def state(self) -> dict[str, float]:
        tensors = {"scale": self._scale, "good": self._good, "row": self._row, "skipped": self._skipped}
        return {name: tensor.item() for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, float]) -> None:
        # A checkpoint of another precision has no scale, but may have counts of bad steps.
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
    """Call the optimizer's step if `finite`, a flag on the device, is true.

    The kernels of torch's fused Adam and AdamW read such a flag, as torch.amp.GradScaler sets it; for other optimizers
    the host waits for the flag. (Fused SGD reads the flag too, but if the first step is skipped, `_fused_sgd` of torch
    2.13 uses a momentum buffer that was never written.)
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


class Cast:
    """Changes no module: `parallelism/shard.py` casts. Other precisions override only the methods that they need."""

    def convert(self, model: nn.Module, device: torch.device) -> None:
        return

    def loss_scale(self, device: torch.device) -> LossScale:
        return LossScale()

    def after_update(self, model: nn.Module) -> None:
        return


class ScaledCast(Cast):
    """Casts, and scales the loss so that gradients stay within float16's range: 2⁻²⁴ to 65,504."""

    def __init__(self, config: Fp16) -> None:
        self._config = config

    def loss_scale(self, device: torch.device) -> LossScale:
        return DynamicLossScale(self._config, device)


def dtype_named(name: str) -> torch.dtype:
    """A dtype of torch by its name in `titanlab.techniques.precision.contract.Formats`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Units(NamedTuple):
    """Modules that FSDP2 must gather as separate units, because parameters have two dtypes.

    whole: units in float32; the model itself stands for all parameters outside of other units
    apart: separate units that are not blocks (every block is a unit)
    """

    whole: tuple[nn.Module, ...] = ()
    apart: tuple[nn.Module, ...] = ()


def keep_in_fp32(model: nn.Module, account: ModelAccount, formats: Formats) -> Units:
    """Add casts around a model's float32 parts, in place, and return the units that FSDP2 must gather separately.

    Args:
        model: on the meta device; a pipeline stage has some of the account's pieces.
    """
    pieces = {piece: module for piece in account.pieces if (module := _piece(model, piece)) is not None}
    parts = {piece: pieces[piece] for piece in matched(account, formats.fp32_parts) if piece in pieces}
    if not parts:
        return Units()
    for piece, part in parts.items():
        _cast_around(part, dtype_named(formats.compute), keeps_output=piece == account.pieces[-1])
    edges = [piece for piece in pieces if not is_in_block(piece) and any(True for _ in pieces[piece].parameters())]
    whole = tuple(parts.values())
    if not account.tied or not any(account.embedding.startswith(f"{piece}.") for piece in parts):
        return Units(whole, tuple(pieces[piece] for piece in edges if piece in parts))
    # Embedding and head share one table, which belongs to the root's unit: that unit is in float32, and the other
    # pieces outside of blocks need separate units.
    return Units((*whole, model), tuple(pieces[piece] for piece in edges if piece not in parts))


def _piece(model: nn.Module, piece: str) -> nn.Module | None:
    module: Any = model
    for step in piece.split("."):
        module = module[step] if isinstance(module, nn.ModuleDict) and step in module else getattr(module, step, None)
    return module if isinstance(module, nn.Module) else None


def _cast_around(part: nn.Module, compute: torch.dtype, *, keeps_output: bool) -> None:
    """Cast a module's inputs to float32, and its output to the compute dtype.

    Hooks outside of the forward pass do this, so that compilation and recomputation do not repeat the casts. With
    `keeps_output` the output stays in float32, as logits do.
    """

    def cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
        return value.to(after) if isinstance(value, Tensor) and value.dtype == before else value

    # `prepend`: cast before tensor parallelism's hook changes the inputs.
    part.register_forward_pre_hook(
        lambda _, inputs: tuple(cast(value, compute, torch.float32) for value in inputs), prepend=True
    )
    if not keeps_output:
        part.register_forward_hook(lambda _, __, output: cast(output, torch.float32, compute))

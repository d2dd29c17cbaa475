"""Parity: do two recipes train the same, except for the rounding of sums in another order?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlab.costs import Layout
from titanlab.distributed import Ranks
from titanlab.recipe import Recipe
from titanlab.records import RunFolder
from titanlab.train import Observer, Totals
from titanlab.train.train import train

# Replaces a reference of zero, to avoid division by zero.
_TINY = 1e-30


@dataclass(kw_only=True)
class TrainingTrace:
    """The record of one run's training."""

    # One number for each step.
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    # Gradients of the first step, as the optimizer got them: name of a parameter → full tensor.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step; full tensors by name
    # Name of a linear layer → full names of its class and of that class's bases.
    layers: dict[str, list[str]] = field(default_factory=dict)
    # For each step, the number of tokens of each expert in each block; empty if the model has no experts.
    loads: list[list[list[float]]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> TrainingTrace:
        return cls(**torch.load(path, weights_only=True))


@dataclass(frozen=True, kw_only=True)
class TraceDifference:
    """The difference of a candidate's trace from a reference's."""

    # Largest relative difference over the steps.
    loss: float
    grad_norm: float
    # Largest ‖Δ‖/‖reference‖ over the tensors, with the tensor's name.
    gradient: tuple[float, str]
    parameter: tuple[float, str]

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.gradient[0], self.parameter[0])

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, grad norm {self.grad_norm:.1e}, "
            f"gradient {self.gradient[0]:.1e} ({self.gradient[1]}), "
            f"parameter {self.parameter[0]:.1e} ({self.parameter[1]})"
        )


class Tracer(Observer):
    """Observes a run on one of its ranks, and records the trace.

    Args:
        layout: the layout of the run; None: one process.
        file: where to write the trace at the end; None: do not write it.
    """

    def __init__(self, layout: Layout | None = None, file: Path | None = None) -> None:
        self.trace = TrainingTrace()
        self._layout = layout or Layout()
        self._file = file

    def after_step(self, step: int, totals: Totals) -> None:
        self.trace.losses.append(totals.loss)
        self.trace.grad_norms.append(totals.grad_norm)
        if totals.load is not None:
            self.trace.loads.append([list(block) for block in totals.load.counts])

    def with_gradients(self, step: int, model: nn.Module) -> None:
        if not self.trace.gradients:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.trace.gradients = _everywhere(gradients, self._layout)
            # Record the bases of layers' classes too, because FSDP2 derives its own class from a layer's class.
            self.trace.layers = {
                name: [f"{base.__module__}.{base.__qualname__}" for base in type(layer).__mro__]
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear)
            }

    def at_end(self, model: nn.Module) -> None:
        self.trace.parameters = _everywhere(dict(model.named_parameters()), self._layout)
        if self._file is not None:
            self.trace.save(self._file)


def trace(recipe: Recipe, run: RunFolder, ranks: Ranks) -> TrainingTrace:
    """Train as one of `ranks.world` ranks, which all call this; every rank returns the full trace."""
    tracer = Tracer(recipe.layout)
    train(recipe, run, ranks, observer=tracer)
    return tracer.trace


def compare(reference: TrainingTrace, candidate: TrainingTrace) -> TraceDifference:
    """Compare a trace with a reference. ValueError: they have different steps or tensors, and cannot be compared."""
    return TraceDifference(
        loss=_relative(reference.losses, candidate.losses, "losses"),
        grad_norm=_relative(reference.grad_norms, candidate.grad_norms, "gradient norms"),
        gradient=_farthest(reference.gradients, candidate.gradients, "gradients"),
        parameter=_farthest(reference.parameters, candidate.parameters, "parameters"),
    )


def farthest(reference: TrainingTrace, candidates: Sequence[TrainingTrace]) -> TraceDifference:
    """For each number, the largest difference of any rank's trace from a reference: one rank alone may be wrong.

    Raises:
        ValueError: as in `compare`.
    """
    differences = [compare(reference, candidate) for candidate in candidates]
    return TraceDifference(**{name: max(vars(each)[name] for each in differences) for name in vars(differences[0])})


def _relative(reference: list[float], candidate: list[float], what: str) -> float:
    if len(reference) != len(candidate) or not reference:
        raise ValueError(f"{what} of {len(reference)} steps against {len(candidate)}")
    return max(_found(abs(a - b) / max(abs(a), _TINY)) for a, b in zip(reference, candidate, strict=True))


def _farthest(
    reference: Mapping[str, torch.Tensor], candidate: Mapping[str, torch.Tensor], what: str
) -> tuple[float, str]:
    if reference.keys() != candidate.keys() or not reference:
        raise ValueError(f"{what} differ in names: {sorted(reference.keys() ^ candidate.keys())[:4]}")
    for name, tensor in reference.items():
        if tensor.shape != candidate[name].shape:
            raise ValueError(f"{what} differ in shape: {name} is {tensor.shape} and {candidate[name].shape}")
    distances = []
    for name, tensor in reference.items():
        norm = torch.linalg.vector_norm(tensor.double()).clamp(min=_TINY)
        distance = torch.linalg.vector_norm(tensor.double() - candidate[name].double()) / norm
        distances.append((_found(float(distance)), name))
    return max(distances)


def _found(difference: float) -> float:
    """The difference, or infinity for NaN, so that `max` finds it."""
    return math.inf if math.isnan(difference) else difference


def _everywhere(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The full tensors of all stages, on every rank; a rank keeps its own copies of its own stages."""
    whole = {name: _whole(tensor) for name, tensor in tensors.items()}
    if layout.pipeline > 1:
        parts: list[dict[str, torch.Tensor]] = [whole] * layout.world
        dist.all_gather_object(parts, whole)
        for part in parts:
            whole = {**part, **whole}
    return whole


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # Copy into a plain tensor: a precision may use a tensor subclass, whose clones have that class too.
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    whole.copy_(tensor)
    return whole

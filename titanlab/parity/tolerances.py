"""The tolerances of proofs: how far two runs may differ that train the same. Torch-free.

In fp32 what is left between two layouts is the rounding of sums in another order: at most 2e-6 is measured in all
rows of docs/parity.md, and the bar is 1e-5. It needs an eps of Adam of at least 1e-6: with the usual 1e-8 an element
whose gradient is nothing but rounding moves as far as any other, the other way in another layout.

In fewer bits another layout rounds other sums: two runs that round independently are √2 times as far from each other
as one of them is from exact. So the bar is twice the distance of the one-process run from fp32, which each proof
measures; a gradient that is summed over the wrong ranks is a hundred times as far.

Loss and gradient norm are sums of many numbers, and their distances may be small by chance. So their bar is never below
half of the distance of the gradients, a quarter of theirs: the norm differs by at most as much as the gradients do.

A precision that did not compute as its name says would be nearer to fp32: a run must be at least a quarter as far from
fp32 as the one-process run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Relative, for losses, gradient norms, and ‖Δ‖/‖reference‖ of a tensor, in fp32.
FP32 = 1e-5
# Times the distance of the one-process run from fp32, in fewer bits.
ROUNDINGS = 2.0
LEAST_ROUNDING = 0.25
LEAST_SCALAR = 0.25
# The least eps of Adam with which layouts can be compared.
LEAST_EPS = 1e-6


# Of parameters, losses and norms of later steps with optimizers that round more than the gradients do. Muon makes
# matrices orthogonal in bf16: 3.6e-4 of a parameter is measured after three steps. In averages of few bits a sum that
# is rounded otherwise may get the neighbouring code: 6e-6 is measured, and one code is 5 % of one element's update.
OPTIMIZERS: Mapping[str, Mapping[str, float]] = {
    "muon": {"parameter": 3e-3, "loss": 1e-4, "grad_norm": 1e-3},
    "adamw_8bit": {"parameter": 1e-3, "loss": 1e-5, "grad_norm": 1e-4},
    "adamw_4bit": {"parameter": 1e-3, "loss": 1e-5, "grad_norm": 1e-4},
    "adamw_fp8": {"parameter": 1e-3, "loss": 1e-5, "grad_norm": 1e-4},
}
NUMBERS = ("loss", "grad_norm", "gradient", "parameter")


def in_fp32(optimizer: str) -> dict[str, float]:
    """The tolerances in fp32, by the name of the number."""
    return {name: OPTIMIZERS.get(optimizer, {}).get(name, FP32) for name in NUMBERS}


def in_fewer_bits(*, loss: float, grad_norm: float, gradient: float, parameter: float) -> dict[str, float]:
    """The tolerances in a lower precision, from the distances of one process in it from fp32."""
    scalar = max(loss, grad_norm, LEAST_SCALAR * gradient)
    values = {"loss": scalar, "grad_norm": scalar, "gradient": gradient, "parameter": parameter}
    return {name: ROUNDINGS * value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class RunTolerance:
    """How far the logged numbers of two finished runs may differ, relative to those of the first run.

    Attributes:
        first: of loss and gradient norm in the first step, in which both have the same parameters.
        loss: largest, of later steps.
        grad_norm: median, of later steps.
    """

    first: float
    loss: float
    grad_norm: float

    def to_mapping(self) -> dict[str, float]:
        """By the name of the number."""
        return {"first_step": self.first, "loss": self.loss, "grad_norm": self.grad_norm}


# In the first step a layout rounds other sums, and nothing has grown: measured are 1e-7 in fp32, 7e-4 (of the norm)
# between bf16 and fp32, 1e-2 in float8. From there on rounding grows with every step of any layout: after 40 steps of
# the quickstart's model 5e-5 of the loss in fp32 and 2e-2 between bf16 and fp32. Norms have peaks that come a step
# sooner or later (70 % of one step's norm is measured between bf16 and fp32): their median counts, 2e-4 and 2e-1.
RUNS: Mapping[str, RunTolerance] = {
    "fp32": RunTolerance(first=1e-5, loss=1e-2, grad_norm=5e-2),
    "16 bits": RunTolerance(first=1e-2, loss=5e-2, grad_norm=5e-1),
    "float8": RunTolerance(first=5e-2, loss=1e-1, grad_norm=5e-1),
}


def of_runs(precision: str) -> RunTolerance:
    """The tolerance for logged numbers of runs in a precision, by its name."""
    if precision in ("fp32", "fp64"):
        return RUNS["fp32"]
    return RUNS["float8"] if "fp8" in precision or "float8" in precision else RUNS["16 bits"]

"""The tolerances of proofs: how far two runs that train the same may differ. Torch-free.

In fp32 two layouts differ only because they round sums in another order: the largest measured difference in
docs/parity.md is 2e-6, and the tolerance is 1e-5. This needs an eps of Adam of at least 1e-6: with the usual 1e-8 an
element whose gradient is only rounding error moves as far as any other, and in another layout it may move the other
way.

In fewer bits another layout rounds other sums: two runs that round independently are √2 times as far from each other as
one of them is from the exact result. So the tolerance is twice the distance of the one-process run from fp32, which
each proof measures; a gradient that is summed over the wrong ranks is a hundred times as far away.

Loss and gradient norm are sums of many numbers, and their distances may be small by chance. So their tolerance is at
least half of the distance of the gradients, which is a quarter of the gradients' tolerance. The norm differs by at most
as much as the gradients do.

A run that does not really compute in its precision is nearer to fp32. So a run must be at least a quarter as far from
fp32 as the one-process run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from titanlab.techniques.optimizer.contract import OptimizerConfig
from titanlab.techniques.precision.contract import PrecisionConfig

# Relative, for losses, gradient norms, and ‖Δ‖/‖reference‖ of a tensor, in fp32.
FP32 = 1e-5
# In fewer bits: the tolerance as a multiple of the distance of the one-process run from fp32.
ROUNDINGS = 2.0
LEAST_ROUNDING = 0.25
LEAST_SCALAR = 0.25
# The least eps of Adam with which layouts can be compared.
LEAST_EPS = 1e-6


NUMBERS = ("loss", "grad_norm", "gradient", "parameter")


def in_fp32(optimizer: OptimizerConfig) -> dict[str, float]:
    """The tolerances in fp32, by the name of the number."""
    return {name: optimizer.tolerances.get(name, FP32) for name in NUMBERS}


def in_fewer_bits(optimizer: OptimizerConfig, distances: Mapping[str, float]) -> dict[str, float]:
    """The tolerances in a lower precision; `distances`: how far the one-process run in it is from fp32."""
    scalar = max(distances["loss"], distances["grad_norm"], LEAST_SCALAR * distances["gradient"])
    values = {**distances, "loss": scalar, "grad_norm": scalar}
    return {name: max(least, ROUNDINGS * values[name]) for name, least in in_fp32(optimizer).items()}


class RunTolerance(NamedTuple):
    """How far the logged numbers of two finished runs may differ, relative to those of the first run."""

    first_step: float  # of loss and gradient norm in the first step, in which both runs have the same parameters
    loss: float  # largest difference of a loss, over all steps
    grad_norm: float  # median difference of gradient norms, over all steps


# In the first step layouts round different sums, but errors have not grown yet. Measured: 1e-7 in fp32, 7e-4 (of the
# norm) between bf16 and fp32, 1e-2 in float8. Then errors grow with every step of any layout. Measured after 40 steps
# of the quickstart's model: 5e-5 of the loss in fp32, 2e-2 between bf16 and fp32. Peaks of the norm come a step sooner
# or later (a step's norm differs by up to 70 % between bf16 and fp32), so the median counts: 2e-4 and 2e-1.
RUNS: Mapping[str, RunTolerance] = {
    "fp32": RunTolerance(first_step=1e-5, loss=1e-2, grad_norm=5e-2),
    "16 bits": RunTolerance(first_step=1e-2, loss=5e-2, grad_norm=5e-1),
    "float8": RunTolerance(first_step=5e-2, loss=1e-1, grad_norm=5e-1),
}


def of_runs(precision: PrecisionConfig) -> RunTolerance:
    """The tolerance for logged numbers of runs in a precision."""
    bits = precision.product_bits()
    return RUNS["fp32" if bits > 16 else "16 bits" if bits > 8 else "float8"]

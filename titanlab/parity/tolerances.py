"""The tolerances of proofs: how far two runs may differ that train the same. Torch-free.

In fp32 what is left between two layouts is the rounding of sums in another order: at most 2e-6 is measured in all
rows of docs/parity.md, and the bar is 1e-5. It needs an eps of Adam of at least 1e-6: with the usual 1e-8 an element
whose gradient is nothing but rounding moves as far as any other, the other way in another layout.

In fewer bits another layout rounds other sums: two runs that round independently are √2 times as far from each other
as one of them is from exact. So the bar is twice the distance of the one-process run from fp32, which each proof
measures; a gradient that is summed over the wrong ranks is a hundred times as far.

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
# The least eps of Adam with which layouts can be compared.
LEAST_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class RunTolerance:
    """How far the logged numbers of two finished runs may differ, relative to the first.

    Attributes:
        loss: of any logged step.
        grad_norm: of any logged step.
        reason: where the numbers come from.
    """

    loss: float
    grad_norm: float
    reason: str


# Differences of rounding grow with every step that follows, in any layout: two layouts of one recipe in fp32 differ by
# 1e-7 in the first step and by 1e-5 to 1e-4 after hundreds. A fault of a layout is seen in the first steps, and is
# larger: a gradient that is twice too large, or a clip factor of one rank, changes the logged norm by parts of it.
RUNS: Mapping[str, RunTolerance] = {
    "fp32": RunTolerance(loss=1e-3, grad_norm=1e-2, reason="rounding of sums in fp32, grown over hundreds of steps"),
    "16 bits": RunTolerance(loss=1e-2, grad_norm=1e-1, reason="products rounded to 8 or 11 bits"),
    "float8": RunTolerance(loss=3e-2, grad_norm=3e-1, reason="products rounded to 4 bits"),
}


def of_runs(precision: str) -> RunTolerance:
    """The tolerance for logged numbers of runs in a precision, by its name."""
    if precision in ("fp32", "fp64"):
        return RUNS["fp32"]
    return RUNS["float8"] if "fp8" in precision or "float8" in precision else RUNS["16 bits"]

"""An option says itself how much it rounds; options of other packages too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from titanlab.options import discover
from titanlab.prove import tolerances
from titanlab.prove.tolerances import FP32, RUNS
from titanlab.techniques.precision.cast_schema import Bf16


@dataclass(frozen=True, kw_only=True)
class Narrow(Bf16):
    """A precision of another package whose name says nothing about its bits."""

    kind: str = "narrow"

    def product_bits(self) -> int:
        return 6


@pytest.mark.parametrize("kind", discover()["precision"])
def test_runs_have_the_tolerance_of_the_bits_that_are_multiplied(kind):
    bits = {"fp32": "fp32", "bf16": "16 bits", "bf16_full": "16 bits", "fp16": "16 bits"}
    assert tolerances.of_runs(discover()["precision"][kind].schema()) == RUNS[bits.get(kind, "float8")]


def test_another_packages_precision_has_the_tolerance_of_its_bits():
    assert tolerances.of_runs(Narrow()) == RUNS["float8"]


def test_an_optimizer_that_rounds_more_says_so():
    class Rounding(discover()["optimizer"]["adamw"].schema):
        tolerances: ClassVar[Mapping[str, float]] = {"parameter": 0.5}

    assert tolerances.in_fp32(Rounding()) == {"loss": FP32, "grad_norm": FP32, "gradient": FP32, "parameter": 0.5}
    assert tolerances.in_fp32(discover()["optimizer"]["muon"].schema())["parameter"] == 3e-3

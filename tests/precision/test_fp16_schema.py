"""Fields of fp16: which scales of a loss there may be, and the dtypes that follow from them."""

from __future__ import annotations

import pytest

from tests.precision.conftest import field_is_refused_and_mended
from titanlab.techniques.precision.cast_schema import LARGEST, Fp16
from titanlab.techniques.precision.contract import Formats

FIELDS = [
    ({"reduce": "bf16"}, "precision.reduce=bf16: is no dtype that fp16", {"reduce": "fp16"}),
    ({"init_scale": 0.0}, "precision.init_scale=0.0: must be positive", {"init_scale": 65536.0}),
    ({"init_scale": float("inf")}, "precision.init_scale=inf: must be positive and at most", {"init_scale": 65536.0}),
    ({"init_scale": float("nan")}, "precision.init_scale=nan: must be positive and at most", {"init_scale": 65536.0}),
    ({"growth_factor": 1.0}, "precision.growth_factor=1.0: must be above 1", {"growth_factor": 2.0}),
    ({"backoff_factor": 1.0}, "precision.backoff_factor=1.0: must lie between", {"backoff_factor": 0.5}),
    ({"growth_interval": 0}, "precision.growth_interval=0: must be at least 1", {"growth_interval": 2000}),
    ({"max_skips": 0}, "precision.max_skips=0: must be at least 1", {"max_skips": 20}),
    ({"min_scale": 0.0}, "precision.min_scale=0.0: must be positive and at most", {"min_scale": 1.0}),
    ({"init_scale": 0.5}, "precision.min_scale=1.0: must be positive and at most init_scale=0.5", {"min_scale": 0.5}),
    ({"init_scale": 2 * LARGEST}, "precision.init_scale=3.402", {"init_scale": 65536.0}),
    ({"backoff_factor": 0.0}, "precision.backoff_factor=0.0: must lie between", {"backoff_factor": 0.5}),
    ({"min_scale": 65537.0}, "precision.min_scale=65537.0: must be positive and at most init_scale=65536", {"min_scale": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told", "cure"), FIELDS)
def test_a_field_that_breaks_a_rule(fields, told, cure):
    field_is_refused_and_mended(Fp16, fields, told, cure)


def test_the_largest_and_a_constant_scale_are_taken():
    assert Fp16(init_scale=LARGEST).init_scale == 2.0**127
    assert Fp16(init_scale=1.0, min_scale=1.0, growth_interval=1, max_skips=1, dynamic=False).min_scale == 1.0


def test_it_computes_in_float16_and_sums_as_it_is_told():
    assert Fp16().formats() == Formats(master="float32", compute="float16", reduce="float32")
    formats = Fp16(reduce="fp16", fp32_parts=["head", "norm"]).formats()
    assert formats == Formats(master="float32", compute="float16", reduce="float16", fp32_parts=("head", "norm"))

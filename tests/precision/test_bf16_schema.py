"""Fields of bf16 and bf16_full, the dtypes that follow from them, and GPUs that are too old."""

from __future__ import annotations

import pytest

from tests.precision.conftest import field_is_refused_and_mended, given
from titanlab.errors import ConfigError
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16
from titanlab.techniques.precision.contract import Formats

FIELDS = [
    (Bf16, {"reduce": "fp16"}, "precision.reduce=fp16: is no dtype that bf16", {"reduce": "fp32"}),
    (Bf16, {"reduce": ""}, "precision.reduce=: is no dtype", {"reduce": "bf16"}),
    (Bf16Full, {"reduce": "fp8"}, "precision.reduce=fp8: is no dtype", {"reduce": "bf16"}),
    (Bf16Full, {"reduce": "fp16"}, "precision.reduce=fp16: is no dtype that bf16", {"reduce": "fp32"}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fields", "told", "cure"), FIELDS)
def test_a_field_that_breaks_a_rule(schema, fields, told, cure):
    field_is_refused_and_mended(schema, fields, told, cure)


def test_bf16_stores_in_float32():
    assert Bf16().formats() == Formats(master="float32", compute="bfloat16", reduce="float32")
    formats = Bf16(reduce="bf16", fp32_parts=["head", "norm"]).formats()
    assert formats == Formats(master="float32", compute="bfloat16", reduce="bfloat16", fp32_parts=("head", "norm"))


def test_bf16_full_stores_in_bfloat16():
    assert Bf16Full().formats() == Formats(master="bfloat16", compute="bfloat16", reduce="float32")
    assert Bf16Full(reduce="bf16").formats() == Formats(master="bfloat16", compute="bfloat16", reduce="bfloat16")


def test_parts_are_checked_too():
    """The check of the device is in addition to that of the parts."""
    with pytest.raises(ConfigError, match="no piece of the model is called heads"):
        Bf16(fp32_parts=["heads"]).check(given())


@pytest.mark.parametrize("schema", [Bf16, Bf16Full])
@pytest.mark.parametrize(
    ("device", "old"),
    [("Tesla V100-SXM2-32GB", True), ("Tesla T4", True), ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA H200", False)],
)
def test_bf16_on_a_gpu_that_is_too_old(schema, device, old):
    on_gpu = given(device=device)
    if not old:
        schema().check(on_gpu)
        return
    with pytest.raises(ConfigError, match=rf"precision={schema().kind}: {device} has no units.*try precision=fp16"):
        schema().check(on_gpu)
    Fp16().check(on_gpu)

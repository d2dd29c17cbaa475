"""The three float8 options of torchao: their products, and where weights are gathered in float8."""

from __future__ import annotations

import pytest

from tests.precision.conftest import given, model_of, setting_is_refused_and_mended
from titanlab.techniques.precision.contract import ProductFormat
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise

H100 = "NVIDIA H100 80GB HBM3"
EIGHTS = "float8_e4m3fn"
ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")

# As in the tests of the schemas' base: fields and setting; how the line begins, its cure; what mends it.
GATHERED = [
    ({"cpu_offload": True, "layout": {"shard": 2}}, "precision.all_gather=true: computes scales where the weights rest", "try false", {"all_gather": False}),
    ({"layout": {"shard": 3}}, "precision.all_gather=true: cannot cut the 64 rows that a process has of layers.0.attention.wq into 3 equal parts", "try false", {"all_gather": False}),
    ({"layout": {"shard": 24, "tensor": 2}, "model": {"kv_heads": 4}}, "precision.all_gather=true: cannot cut the 32 rows", "try false", {"all_gather": False}),
]  # fmt: skip


@pytest.mark.parametrize(("where", "begins", "cure", "mended"), GATHERED)
def test_weights_that_cannot_be_gathered_in_float8_are_refused_and_mended(where, begins, cure, mended):
    setting_is_refused_and_mended(Float8Tensorwise, {}, where, begins, cure, mended, {})


def test_only_layers_that_multiply_in_float8_are_cut_in_equal_parts():
    """192 rows of the feed-forward in 6 parts, while the 64 rows of the attention are not gathered in float8."""
    Float8Tensorwise(skip=["output", "attention", "w2"]).check(given(layout={"shard": 6}))


def test_only_tensorwise_weights_are_gathered_in_float8_and_only_if_they_are_converted():
    account = model_of(layers=1)
    assert Float8Tensorwise(skip=["output", "w*"]).float8_gathered(account) == frozenset()
    gathered = Float8Tensorwise(skip=["output", "feed_forward"]).float8_gathered(account)
    assert gathered == {f"layers.0.{name}.weight" for name in ATTENTION}
    assert Float8Tensorwise(all_gather=False).float8_gathered(account) == frozenset()
    assert Float8Rowwise().float8_gathered(account) == frozenset()


def test_scales_by_row_are_finer_and_dearer():
    products = {schema: schema().product() for schema in (Float8Tensorwise, Float8Rowwise, Float8RowwiseWithGwHp)}
    assert products[Float8RowwiseWithGwHp] == ProductFormat(
        forward=EIGHTS, input_gradient=EIGHTS, weight_gradient="bfloat16", cast_bytes=6.0, cast_kernels=2
    )
    for schema in (Float8Tensorwise, Float8Rowwise):
        assert products[schema].weight_gradient == EIGHTS
    assert products[Float8Rowwise].cast_bytes > products[Float8Tensorwise].cast_bytes


def test_a_gradient_of_weights_in_bfloat16_takes_any_number_of_tokens():
    where = {"device": H100, "seq_len": 33, "microbatch": 1}
    Float8RowwiseWithGwHp().check(given(**where))
    line = "training.seq_len=33: a process has 33 tokens of a microbatch"
    setting_is_refused_and_mended(Float8Rowwise, {}, where, line, "try 32", {}, {"seq_len": 32})

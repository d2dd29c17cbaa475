"""How linear layers multiply, as the planner reads it: the dtypes of three products, and what casts move."""

import pytest

from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8

MODEL = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocab_size=64).account()
FLOAT8 = "float8_e4m3fn"


def test_bf16_multiplies_in_its_own_precision():
    assert Bf16().products(MODEL) == {}


@pytest.mark.parametrize("precision", [Float8Tensorwise(), Float8Rowwise(), Mxfp8(skip=["output", "wk"])])
def test_converted_layers_multiply_in_float8(precision):
    products = precision.products(MODEL)
    assert set(products) == set(precision.conversion(MODEL).converted)
    assert "output" not in products
    for product in products.values():
        assert (product.forward, product.input_gradient, product.weight_gradient) == (FLOAT8,) * 3
        assert product.cast_bytes > 0


def test_gradients_of_weights_in_high_precision():
    product = Float8RowwiseWithGwHp().products(MODEL)["layers.0.attention.wq"]
    assert (product.forward, product.input_gradient, product.weight_gradient) == (FLOAT8, FLOAT8, "bfloat16")


def test_finer_scales_move_more():
    name = "layers.0.attention.wq"
    by_tensor, by_row = (kind.products(MODEL)[name].cast_bytes for kind in (Float8Tensorwise(), Float8Rowwise()))
    assert by_tensor < by_row

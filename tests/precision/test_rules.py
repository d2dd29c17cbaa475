"""Wrong precisions are refused in one line, each with a cure that works."""

import pytest

from tests import tiny
from tests.precision.conftest import field_is_refused_and_mended
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.precision.cast_schema import Bf16, Fp16, Fp32
from titanlab.techniques.precision.contract import matched


def test_fp32_reduces_in_fp32_only():
    line = "precision.reduce=bf16: fp32 is what"
    field_is_refused_and_mended(Fp32, {"reduce": "bf16"}, line, {"reduce": "fp32"})


@pytest.mark.parametrize(
    ("parts", "model", "told", "cure"),
    [
        (["heads"], {}, "precision.fp32_parts=[heads]: no piece of the model is called heads", ["head"]),
        (["head", "layers.9"], {}, "no piece of the model is called layers.9; choose from", ["head", "layers.*"]),
        (["layers.0.attention"], {}, "no piece of the model is called layers.0.attention", ["norm"]),
        ([""], {}, "no piece of the model is called nothing", []),
        (["head"], {"tied_embeddings": True}, "the head is the embedding's table", ["embedding", "head"]),
        (["tok_*"], {"tied_embeddings": True}, "name both, embedding and head, or neither", ["norm"]),
    ],
)
@pytest.mark.parametrize("schema", [Bf16, Fp16])
def test_parts_that_the_model_does_not_have(tmp_path, schema, parts, model, told, cure):
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, precision=schema(fp32_parts=parts), **model)
    assert told in str(refused.value)
    tiny.recipe(tmp_path, precision=schema(fp32_parts=cure), **model)


def test_words_and_patterns_name_pieces_in_the_order_of_the_forward_pass(tmp_path):
    account = setting(tiny.recipe(tmp_path, layers=3)).model
    assert matched(account, ["head", "embedding"]) == ("tok_embeddings", "output")
    assert matched(account, ["layers.[12]", "norm"]) == ("layers.1", "layers.2", "norm")
    assert matched(account, ["layers.*", "layers.0"]) == ("layers.0", "layers.1", "layers.2")
    assert matched(account, ["*"]) == account.pieces
    assert matched(account, []) == ()

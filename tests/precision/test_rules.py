"""Wrong precisions are refused in one line, each with a cure that works."""

from dataclasses import replace

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.precision.account import matched
from titanlab.precision.bf16_schema import Bf16, Bf16Full
from titanlab.precision.fp16_schema import Fp16
from titanlab.precision.fp32_schema import Fp32
from titanlab.recipe.recipe_rules import setting

FIELDS = [
    (Fp32, {"reduce": "bf16"}, "precision.reduce=bf16: fp32 is what", {"reduce": "fp32"}),
    (Bf16, {"reduce": "fp16"}, "precision.reduce=fp16: is no dtype that bf16", {"reduce": "fp32"}),
    (Bf16, {"reduce": ""}, "precision.reduce=: is no dtype", {"reduce": "bf16"}),
    (Bf16Full, {"reduce": "fp8"}, "precision.reduce=fp8: is no dtype", {"reduce": "bf16"}),
    (Fp16, {"reduce": "bf16"}, "precision.reduce=bf16: is no dtype that fp16", {"reduce": "fp16"}),
    (Fp16, {"init_scale": 0.0}, "precision.init_scale=0.0: must be positive", {"init_scale": 65536.0}),
    (Fp16, {"init_scale": float("inf")}, "precision.init_scale=inf: must be positive and at most", {"init_scale": 65536.0}),
    (Fp16, {"init_scale": float("nan")}, "precision.init_scale=nan: must be positive and at most", {"init_scale": 65536.0}),
    (Fp16, {"growth_factor": 1.0}, "precision.growth_factor=1.0: must be above 1", {"growth_factor": 2.0}),
    (Fp16, {"backoff_factor": 1.0}, "precision.backoff_factor=1.0: must lie between", {"backoff_factor": 0.5}),
    (Fp16, {"growth_interval": 0}, "precision.growth_interval=0: must be at least 1", {"growth_interval": 2000}),
    (Fp16, {"max_skips": 0}, "precision.max_skips=0: must be at least 1", {"max_skips": 20}),
    (Fp16, {"min_scale": 0.0}, "precision.min_scale=0.0: must be positive and at most", {"min_scale": 1.0}),
    (Fp16, {"init_scale": 0.5}, "precision.min_scale=1.0: must be positive and at most init_scale=0.5", {"min_scale": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "given", "told", "cure"), FIELDS)
def test_a_field_that_breaks_a_rule(schema, given, told, cure):
    with pytest.raises(ConfigError) as refused:
        schema(**given)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)
    for value in cure.values():
        assert (f"{value:g}" if isinstance(value, float) else str(value)) in refused.value.cure
    schema(**{**given, **cure})


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


def test_a_model_without_pieces_has_no_parts(tmp_path):
    made = setting(tiny.recipe(tmp_path))
    bare = replace(made, model=replace(made.model, pieces=()))
    Bf16().check(bare)
    with pytest.raises(ConfigError, match=r"=\[head\]: the model does not say what its pieces are; try \[\]"):
        Bf16(fp32_parts=["head"]).check(bare)


@pytest.mark.parametrize("schema", [Bf16, Bf16Full])
@pytest.mark.parametrize(
    ("device", "old"),
    [("Tesla V100-SXM2-32GB", True), ("Tesla T4", True), ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA H200", False)],
)
def test_bf16_on_a_gpu_that_is_too_old(tmp_path, schema, device, old):
    on_gpu = replace(setting(tiny.recipe(tmp_path)), accelerator="cuda", device=device)
    if not old:
        schema().check(on_gpu)
        return
    with pytest.raises(ConfigError, match=rf"precision={schema().kind}: {device} has no units.*try precision=fp16"):
        schema().check(on_gpu)
    Fp16().check(on_gpu)


def test_words_and_patterns_name_pieces_in_the_order_of_the_forward_pass(tmp_path):
    account = setting(tiny.recipe(tmp_path, layers=3)).model
    assert matched(account, ["head", "embedding"]) == ("tok_embeddings", "output")
    assert matched(account, ["layers.[12]", "norm"]) == ("layers.1", "layers.2", "norm")
    assert matched(account, ["layers.*", "layers.0"]) == ("layers.0", "layers.1", "layers.2")
    assert matched(account, ["*"]) == account.pieces
    assert matched(account, []) == ()

"""What a precision's config says and refuses: fields, parts in float32, layers in 8 bits; what a line advises works."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from tests import tiny
from tests.precision.conftest import given, model_of
from tests.prove.parity_rows import SCHEDULES
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.precision.cast_schema import LARGEST, Bf16, Bf16Full, Fp16, Fp32, parts_within
from titanlab.techniques.precision.contract import ProductFormat, matched
from titanlab.techniques.precision.float8_schema import (
    Float8Rowwise,
    Float8RowwiseWithGwHp,
    Float8Tensorwise,
    Mxfp8,
)

FLOAT8 = (Float8Tensorwise, Float8Rowwise, Float8RowwiseWithGwHp)
V100, A100, H100, B200 = "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
UNHEARD = "NVIDIA of tomorrow"
INF, NAN = float("inf"), float("nan")

# Fields; how the line begins; other values of them, which the line names and which are taken.
FIELDS = [
    (Fp32, {"reduce": "bf16"}, "precision.reduce=bf16: no such choice; choose one of fp32", {"reduce": "fp32"}),
    (Bf16, {"reduce": "fp16"}, "precision.reduce=fp16: no such choice; choose one of fp32, bf16", {"reduce": "fp32"}),
    (Fp16, {"reduce": "bf16"}, "precision.reduce=bf16: no such choice; choose one of fp32, fp16", {"reduce": "fp16"}),
    (Fp16, {"init_scale": 0.0}, "precision.init_scale=0.0: must be positive", {"init_scale": 65536.0}),
    (Fp16, {"init_scale": INF}, "precision.init_scale=inf: must be positive and at most", {"init_scale": 65536.0}),
    (Fp16, {"init_scale": 2 * LARGEST}, "precision.init_scale=3.402", {"init_scale": 65536.0}),
    (Fp16, {"init_scale": 0.5}, "precision.min_scale=1.0: must be positive and at most init_scale=0.5", {"min_scale": 0.5}),
    (Fp16, {"min_scale": 0.0}, "precision.min_scale=0.0: must be positive and at most", {"min_scale": 1.0}),
    (Fp16, {"growth_factor": 1.0}, "precision.growth_factor=1.0: must be above 1", {"growth_factor": 2.0}),
    (Fp16, {"growth_interval": 0}, "precision.growth_interval=0: must be at least 1", {"growth_interval": 2000}),
    (Fp16, {"backoff_factor": 0.0}, "precision.backoff_factor=0.0: must lie between", {"backoff_factor": 0.5}),
    (Fp16, {"backoff_factor": 1.0}, "precision.backoff_factor=1.0: must lie between", {"backoff_factor": 0.5}),
    (Fp16, {"max_skips": 0}, "precision.max_skips=0: must be at least 1", {"max_skips": 20}),
    (Float8Rowwise, {"emulate": "maybe"}, "precision.emulate=maybe: no such choice", {"emulate": "auto"}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fields", "told", "cure"), FIELDS)
def test_a_field_that_breaks_a_rule_is_refused_and_mended(schema, fields, told, cure):
    with pytest.raises(ConfigError) as refused:
        schema(**fields)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)
    for value in cure.values():
        assert (f"{value:g}" if isinstance(value, float) else str(value)) in refused.value.cure
    schema(**{**fields, **cure})


def test_values_at_the_ends_of_their_ranges_are_taken():
    assert Fp16(init_scale=LARGEST).init_scale == 2.0**127
    assert Fp16(init_scale=1.0, min_scale=1.0, growth_interval=1, max_skips=1, dynamic=False).min_scale == 1.0
    # As the command line gives them.
    assert (Float8Rowwise(emulate=True).emulate, Float8Rowwise(emulate="False").emulate) == ("true", "false")


# Config and setting; how the line begins and what its cure has in it; what mends it: other keys of the config, or others
# of the setting; None: not tried.
WRONG = [
    *((each, {}, {"device": V100}, f"precision={each().kind}: {V100} has no units for bfloat16", "try precision=fp16", None, None) for each in (Bf16, Bf16Full, Float8Rowwise)),
    # Parts.
    *((each, {"fp32_parts": ["heads"]}, {}, "precision.fp32_parts=[heads]: no piece of the model is called heads", "choose from embedding, head, tok_embeddings, layers.*", {"fp32_parts": ["head"]}, {}) for each in (Bf16, Fp16)),
    (Bf16, {"fp32_parts": ["norm", "layers.2"]}, {}, "precision.fp32_parts=[norm,layers.2]: no piece of the model is called layers.2", "layers.*", {"fp32_parts": ["head", "layers.*"]}, {}),
    (Bf16, {"fp32_parts": ["layers.[5-9]"]}, {}, "precision.fp32_parts=[layers.[5-9]]: no piece of the model is called layers.[5-9]", "layers.*", {"fp32_parts": ["layers.1"]}, {}),
    (Bf16, {"fp32_parts": ["layers.0.attention"]}, {}, "precision.fp32_parts=[layers.0.attention]: no piece", "norm", {"fp32_parts": ["norm", "norm"]}, {}),
    (Bf16, {"fp32_parts": [""]}, {}, "precision.fp32_parts=[]: no piece of the model is called nothing", "embedding", {"fp32_parts": []}, {}),
    (Bf16, {"fp32_parts": ["head"]}, {"model": {"tied_embeddings": True}}, "precision.fp32_parts=[head]: the head is the embedding's table", "name both, embedding and head, or neither", {"fp32_parts": ["embedding", "head"]}, {}),
    (Bf16, {"fp32_parts": ["tok_*"]}, {"model": {"tied_embeddings": True}}, "precision.fp32_parts=[tok_*]: the head is", "or neither", {"fp32_parts": ["*"]}, {}),
    # Hardware.
    (Float8Rowwise, {"emulate": "false"}, {"device": A100}, f"precision.emulate=false: {A100} is too old for float8 products: it has compute capability 8.0, they need 8.9", "precision.emulate=true", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {"device": f"{A100} MIG 3g.40gb"}, f"precision.emulate=false: {A100} MIG 3g.40gb is too old", "precision=bf16", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {}, "precision.emulate=false: a CPU has no float8 products", "try auto", {"emulate": "auto"}, {}),
    (Mxfp8, {"emulate": "false"}, {}, "precision.emulate=false: a CPU has no mxfp8 products", "try auto", {"emulate": "auto"}, {}),
    (Mxfp8, {}, {"device": H100}, f"precision=mxfp8: {H100} is too old for mxfp8 products: it has compute capability 9.0, they need 10.0", "precision.emulate=true", {"emulate": "true"}, {}),
    (Mxfp8, {"emulate": "false"}, {"device": H100}, "precision.emulate=false: NVIDIA H100", "precision.emulate=true", {"emulate": "true"}, {}),
    # Dims.
    (Float8Rowwise, {"strict": True}, {"model": {"ffn_dim": 200}}, "precision.strict=true: layers.0.feed_forward.w1 is 200×64, and float8 products need multiples of 16", "try false", {"strict": False}, {}),
    (Float8Rowwise, {}, {"model": {"dim": 72, "heads": 2, "kv_heads": 1, "ffn_dim": 100}}, "precision=float8_rowwise: converts no layer: layers.0.attention.wq is 72×72", "try precision=bf16", None, None),
    (Float8Tensorwise, {}, {"layout": {"tensor": 4}, "model": {"dim": 64, "kv_heads": 2, "heads": 4}}, "parallelism.tensor=4: leaves each process 8×64 of layers.0.attention.wk, and float8 products need multiples of 16", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    (Float8Tensorwise, {}, {"layout": {"tensor": 8}, "model": {"dim": 128, "kv_heads": 8, "heads": 8, "ffn_dim": 192}}, "parallelism.tensor=8: leaves each process 24×128 of layers.0.feed_forward.w1", "try a smaller degree", {}, {"layout": {"tensor": 4}}),
    (Mxfp8, {}, {"layout": {"tensor": 2}}, "parallelism.tensor=2: leaves each process 16×64 of layers.0.attention.wk, and mxfp8 products need multiples of 32", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    *((each, {}, {"device": H100, "seq_len": 33, "microbatch": 1}, "training.seq_len=33: a process has 33 tokens of a microbatch, and float8 needs multiples of 16", "try 32", {}, {"seq_len": 32}) for each in (Float8Tensorwise, Float8Rowwise)),
    (Mxfp8, {}, {"seq_len": 40, "microbatch": 1}, "training.seq_len=40: a process has 40 tokens of a microbatch, and mxfp8 needs multiples of 32", "try 32", {}, {"seq_len": 32}),
    (Mxfp8, {}, {"device": B200, "seq_len": 48, "microbatch": 1}, "training.seq_len=48: a process has 48 tokens of a microbatch, and mxfp8 needs multiples of 32", "try 64", {}, {"seq_len": 64}),
    # Names.
    (Float8Rowwise, {"skip": ["output", "wz"]}, {}, "precision.skip=[output,wz]: wz fits no linear layer", "there are wq, wk, wv, wo, w1, w2, w3, output", {"skip": ["output", "wk"]}, {}),
    (Float8Rowwise, {"skip": ["lm_head"]}, {"model": {"tied_embeddings": True}}, "precision.skip=[lm_head]: lm_head fits no linear layer", "there are", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"skip": ["*"]}, {}, "precision.skip=[*]: names every linear layer", "try [output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"skip": [], "fp32_parts": ["head"]}, {}, "precision.fp32_parts=[head]: output has output, which multiplies in float8", "precision.skip=[output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"fp32_parts": ["layers.0"]}, {}, "precision.fp32_parts=[layers.0]: layers.0 has layers.0.attention.wq", "precision.skip=[output,layers.0]", {"skip": ["output", "layers.0"]}, {}),
    # Layers that are multiplied as one.
    (Float8Rowwise, {"skip": ["output", "wk"]}, {"model": {"fused": True}}, "model.fused=true: multiplies wq, wk, wv as one product, and precision=float8_rowwise does not convert layers.0.attention.wk", "try false, or name all of them in precision.skip: wq, wk, wv", {"skip": ["output", "wq", "wk", "wv"]}, {}),
    (Mxfp8, {}, {"model": {"fused": True}}, "model.fused=true: multiplies several layers as one product", "try false", {}, {"model": {"fused": False}}),
    # Weights that cannot be gathered in float8.
    (Float8Tensorwise, {}, {"cpu_offload": True, "layout": {"shard": 2}}, "precision.all_gather=true: computes scales where weights are kept", "try false", {"all_gather": False}, {}),
    (Float8Tensorwise, {}, {"layout": {"shard": 3}}, "precision.all_gather=true: cannot cut the 64 rows that a process has of layers.0.attention.wq into 3 equal parts", "try false", {"all_gather": False}, {}),
    (Float8Tensorwise, {}, {"layout": {"shard": 24, "tensor": 2}, "model": {"kv_heads": 4}}, "precision.all_gather=true: cannot cut the 32 rows", "try false", {"all_gather": False}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "where", "begins", "cure", "mended", "elsewhere"), WRONG)
def test_what_cannot_work_is_refused_and_mended(kind, config, where, begins, cure, mended, elsewhere):
    with pytest.raises(ConfigError) as refused:
        kind(**config).check(given(**where))
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(begins)
    assert cure in line.rpartition("; ")[2]
    if mended is not None:
        kind(**{**config, **mended}).check(given(**{**where, **elsewhere}))


MAY_WORK = [
    *((each, {}, {"device": device}) for each in (Bf16, Bf16Full) for device in (A100, H100, UNHEARD)),
    (Fp16, {}, {"device": V100}),
    *(
        (each, {}, where)
        for each in FLOAT8
        for where in (
            *({"device": device} for device in ("cpu", H100, A100, UNHEARD)),
            *({"layout": layout} for layout in ({"shard": 2}, {"tensor": 2})),
            *({"model": model} for model in ({"tied_embeddings": True}, {"ffn_dim": 200}, {"fused": True})),
            # Emulated, any number of tokens will do.
            {"seq_len": 33, "microbatch": 1},
        )
    ),
    # The gradient of weights in bfloat16 takes any number of tokens.
    (Float8RowwiseWithGwHp, {}, {"device": H100, "seq_len": 33, "microbatch": 1}),
    # 192 rows of the feed-forward in 6 parts, while the 64 rows of the attention are not gathered in float8.
    (Float8Tensorwise, {"skip": ["output", "attention", "w2"]}, {"layout": {"shard": 6}}),
    (Mxfp8, {}, {"device": B200}),
]


@pytest.mark.parametrize(("kind", "config", "where"), MAY_WORK)
def test_what_may_work_is_not_refused(kind, config, where):
    kind(**config).check(given(**where))


@pytest.mark.parametrize("kind", [*FLOAT8, Mxfp8])
def test_without_torchao_it_is_refused(monkeypatch, kind):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"precision={kind().kind}: needs torchao; pip install torchao"):
        kind().check(given())


def test_a_model_without_pieces_has_no_parts():
    made = given()
    bare = replace(made, model=replace(made.model, pieces=()))
    Bf16().check(bare)
    with pytest.raises(ConfigError, match=r"^precision.fp32_parts=\[norm\]: the model does not say what .*; try \[\]$"):
        Bf16(fp32_parts=["norm"]).check(bare)


def test_a_precision_without_halves_is_refused_under_schedules_that_want_them(tmp_path):
    """Whatever computes weights' gradients later, a list by hand too; the others know how."""
    layout = {"pipeline": 2, "layers": 4, "global_batch": 4, "microbatch": 1}
    for name in ("zbv", "interleaved_zero_bubble", "dualpipe_v", "csv"):
        schedule = SCHEDULES[name]
        rule = f"computes gradients of weights and inputs together, which schedule={schedule.kind} separates"
        with pytest.raises(ConfigError, match=f"precision=mxfp8: {rule}; try schedule=interleaved_1f1b"):
            tiny.recipe(tmp_path, **layout, precision=Mxfp8(), pipeline_schedule=schedule)
        tiny.recipe(tmp_path, **layout, precision=Float8Rowwise(), pipeline_schedule=schedule)
    for name in ("gpipe", "interleaved_1f1b", "looped_bfs"):
        tiny.recipe(tmp_path, **layout, precision=Mxfp8(), pipeline_schedule=SCHEDULES[name])


def test_words_and_patterns_name_pieces_in_the_order_of_the_forward_pass(tmp_path):
    account = setting(tiny.recipe(tmp_path, layers=3)).model
    assert matched(account, ["head", "embedding"]) == ("tok_embeddings", "output")
    assert matched(account, ["layers.[12]", "norm"]) == ("layers.1", "layers.2", "norm")
    assert matched(account, ["layers.*", "layers.0"]) == ("layers.0", "layers.1", "layers.2")
    assert matched(account, ["*"]) == account.pieces
    assert matched(account, []) == ()


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ([], []),
        (["embedding", "norm", "head", "layers.0", "layers.1", "layers.*"], None),
        (["layers.1", "layers.2", "layers.10"], ["layers.1"]),
        (["layers.2.feed_forward.w1", "layers.0.feed_forward.w1", "feed_forward.w1"], ["layers.0.feed_forward.w1", "feed_forward.w1"]),
        (["layers.[01]", "layers.[1-9]"], None),
        (["layers.[2-9]", "layers.??", "layers.1?", "layers.?"], ["layers.?"]),
        (["layers.2*", "layers.1*"], ["layers.1*"]),
    ],
)  # fmt: skip
def test_of_a_smaller_model_only_blocks_that_it_has_are_named(names, kept):
    notes = []
    expected = tuple(names if kept is None else kept)
    assert parts_within(2, tuple(names), key="precision.skip", note=notes.append) == expected
    assert notes == ([] if kept in (None, names) else ["precision.skip names blocks that the reduced model lacks"])


def test_in_a_proof_float8_is_emulated_and_other_fields_stay():
    notes = []
    config = Float8Rowwise(emulate="false", skip=["output", "layers.0", "layers.7"], fp32_parts=["norm", "layers.9"])
    reduced = config.reduced(layers=2, note=notes.append)
    assert reduced == replace(config, emulate="auto", skip=("output", "layers.0"), fp32_parts=("norm",))
    assert notes == [
        "precision=float8_rowwise is emulated: the same rounding, in 32 bits",
        "precision.skip names blocks that the reduced model lacks",
        "precision.fp32_parts names blocks that the reduced model lacks",
    ]
    assert Float8Rowwise(emulate="true").reduced(layers=2, note=notes.append).emulate == "true"
    assert config.emulated() == replace(config, emulate="true")
    assert Bf16(reduce="bf16", fp32_parts=["norm", "layers.[4-7]"]).reduced(layers=2, note=notes.append) == Bf16(
        reduce="bf16", fp32_parts=["norm"]
    )


ATTENTION = tuple(f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
LINEAR = (*ATTENTION, *(f"layers.0.feed_forward.w{number}" for number in (1, 2, 3)))


def test_which_layers_are_converted():
    model = model_of(ffn_dim=200, vocab_size=100, data=tiny.Synthetic(vocab_size=100))
    found = Float8Rowwise(skip=["wk", "layers.1"]).conversion(model)
    assert list(found.converted) == [name for name in ATTENTION if not name.endswith("wk")]
    assert found.skipped == (ATTENTION[1], *(name.replace("layers.0", "layers.1") for name in LINEAR))
    uneven = dict(zip(LINEAR[4:], ((200, 64), (64, 200), (200, 64)), strict=True))
    assert found.uneven == {**uneven, "output": (100, 64)}
    # Many are counted.
    assert str(found) == "3 linear layers, not layers.0.attention.wk, layers.1.attention.wq, 10 more"


@pytest.mark.parametrize(
    ("config", "device", "text"),
    [
        (Float8Rowwise(), "cpu", "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(), H100, "float8_rowwise: 7 linear layers, not output"),
        (Float8Rowwise(), A100, "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(emulate="true"), H100, "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(), UNHEARD, "float8_rowwise: 7 linear layers, not output"),
        (Mxfp8(skip=[]), B200, "mxfp8: 8 linear layers"),
    ],
)
def test_the_table_tells_the_layers_and_whether_they_are_emulated(config, device, text):
    accelerator = "cpu" if device == "cpu" else "cuda"
    assert config.describe(model_of(layers=1), accelerator=accelerator, device=device) == text


def test_products_are_those_of_the_converted_layers():
    account, float8 = model_of(layers=1), "float8_e4m3fn"
    formats = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), float8)
    products = {kind: kind(skip=["output", "feed_forward"]).products(account) for kind in (*FLOAT8, Mxfp8)}
    assert all(list(each) == list(ATTENTION) for each in products.values())
    found = {kind: next(iter(each.values())) for kind, each in products.items()}
    assert found == {
        Float8Tensorwise: ProductFormat(**formats, cast_bytes=7.0, cast_kernels=3),
        # Scales by row are finer and dearer.
        Float8Rowwise: ProductFormat(**formats, cast_bytes=10.0, cast_kernels=4, scales_gradients=True),
        Float8RowwiseWithGwHp: ProductFormat(
            **{**formats, "weight_gradient": "bfloat16"}, cast_bytes=6.0, cast_kernels=2
        ),
        Mxfp8: ProductFormat(**formats, cast_bytes=6.1, cast_kernels=2),
    }
    assert (Bf16().products(account), Bf16().product_bits(), Float8Rowwise().product_bits()) == ({}, 16, 8)


def test_only_tensorwise_weights_are_gathered_in_float8_and_only_if_they_are_converted():
    account = model_of(layers=1)
    gathered = Float8Tensorwise(skip=["output", "feed_forward"]).float8_gathered(account)
    assert gathered == {f"{name}.weight" for name in ATTENTION}
    for other in (Float8Tensorwise(skip=["output", "w*"]), Float8Tensorwise(all_gather=False), Float8Rowwise()):
        assert other.float8_gathered(account) == frozenset()

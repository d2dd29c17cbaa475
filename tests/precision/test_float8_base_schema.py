"""Which layers multiply in 8 bits and how; what cannot is refused in one line, and what the line advises works."""

import importlib.util
from dataclasses import replace

import pytest

from tests import tiny
from tests.precision.conftest import given, model_of, setting_is_refused_and_mended
from titanlab.errors import ConfigError
from titanlab.techniques.precision.contract import ProductFormat
from titanlab.techniques.precision.float8_schema import (
    Conversion,
    Float8Rowwise,
    Float8RowwiseWithGwHp,
    Float8Tensorwise,
)

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
MIG = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"


# Config and setting; how the line begins and what its cure has in it; what mends it: other keys of the config, or others
# of the setting.
WRONG = [
    # Hardware.
    (Float8Rowwise, {"emulate": "false"}, {"device": A100}, "precision.emulate=false: NVIDIA A100-SXM4-80GB is too old for float8 products: it has compute capability 8.0, they need 8.9", "precision.emulate=true", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {"device": MIG}, "precision.emulate=false: NVIDIA A100-SXM4-80GB MIG 3g.40gb is too old", "precision=bf16", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {}, "precision.emulate=false: a CPU has no float8 products", "try auto", {"emulate": "auto"}, {}),
    # Dims.
    (Float8Rowwise, {"strict": True}, {"model": {"ffn_dim": 200}}, "precision.strict=true: layers.0.feed_forward.w1 is 200×64, and float8 products need multiples of 16", "try false", {"strict": False}, {}),
    (Float8Rowwise, {}, {"model": {"dim": 72, "heads": 2, "kv_heads": 1, "ffn_dim": 100}}, "precision=float8_rowwise: converts no layer: layers.0.attention.wq is 72×72", "try precision=bf16", None, None),
    (Float8Tensorwise, {}, {"layout": {"tensor": 4}, "model": {"dim": 64, "kv_heads": 2, "heads": 4}}, "parallelism.tensor=4: leaves each process 8×64 of layers.0.attention.wk, and float8 products need multiples of 16", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    (Float8Tensorwise, {}, {"layout": {"tensor": 8}, "model": {"dim": 128, "kv_heads": 8, "heads": 8, "ffn_dim": 192}}, "parallelism.tensor=8: leaves each process 24×128 of layers.0.feed_forward.w1", "try a smaller degree", {}, {"layout": {"tensor": 4}}),
    (Float8Tensorwise, {}, {"device": H100, "seq_len": 33, "microbatch": 1}, "training.seq_len=33: a process has 33 tokens of a microbatch, and float8 needs multiples of 16", "try 32", {}, {"seq_len": 32}),
    # Names.
    (Float8Rowwise, {"skip": ["output", "wz"]}, {}, "precision.skip=[output,wz]: wz fits no linear layer", "there are wq, wk, wv, wo, w1, w2, w3, output", {"skip": ["output", "wk"]}, {}),
    (Float8Rowwise, {"skip": ["*"]}, {}, "precision.skip=[*]: names every linear layer", "try [output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"skip": [], "fp32_parts": ["head"]}, {}, "precision.fp32_parts=[head]: output has output, which multiplies in float8", "precision.skip=[output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"fp32_parts": ["layers.0"]}, {}, "precision.fp32_parts=[layers.0]: layers.0 has layers.0.attention.wq", "precision.skip=[output,layers.0]", {"skip": ["output", "layers.0"]}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "where", "begins", "cure", "mended", "elsewhere"),
    WRONG,
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_work_is_refused_and_mended(kind, config, where, begins, cure, mended, elsewhere):
    setting_is_refused_and_mended(kind, config, where, begins, cure, mended, elsewhere)


def test_a_word_that_is_no_choice_is_refused():
    with pytest.raises(ConfigError, match="precision.emulate=maybe: no such choice; choose one of auto, true, false"):
        Float8Rowwise(emulate="maybe")
    # As the command line gives them.
    assert Float8Rowwise(emulate=True).emulate == "true"
    assert Float8Rowwise(emulate="False").emulate == "false"


@pytest.mark.parametrize("kind", [Float8Tensorwise, Float8Rowwise, Float8RowwiseWithGwHp])
def test_what_may_work_is_not_refused(kind):
    for where in (
        {},
        {"device": H100},
        {"device": A100},  # emulated
        {"device": "NVIDIA of tomorrow"},  # asked when it is there
        {"layout": {"shard": 2}},
        {"layout": {"tensor": 2}},
        {"model": {"tied_embeddings": True}},
        {"model": {"ffn_dim": 200}},
        # Emulated, any number of tokens will do.
        {"seq_len": 33, "microbatch": 1},
    ):
        kind().check(given(**where))


@pytest.mark.parametrize(
    ("config", "capability", "emulated"),
    [
        (Float8Rowwise(), None, True),
        (Float8Rowwise(), (8, 0), True),
        (Float8Rowwise(), (8, 9), False),
        (Float8Rowwise(), (10, 0), False),
        (Float8Rowwise(emulate="true"), (9, 0), True),
        (Float8Rowwise(emulate="false"), (8, 0), False),
    ],
)
def test_where_it_is_emulated(config, capability, emulated):
    assert config.emulates(capability) == emulated


NAMES = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)


def test_linear_layers_are_converted_but_for_the_head():
    found = Float8Rowwise().conversion(model_of(layers=1))
    assert sorted(found.converted) == sorted(f"layers.0.{name}" for name in NAMES)
    assert found.converted["layers.0.attention.wk"] == (32, 64)
    assert (found.skipped, found.uneven) == (("output",), {})
    assert str(found) == "7 linear layers, not output"


def test_what_is_skipped_or_uneven_is_told():
    found = Float8Rowwise(skip=["wk", "layers.1"]).conversion(
        model_of(ffn_dim=200, vocab_size=100, data=tiny.Synthetic(vocab_size=100))
    )
    assert list(found.converted) == [f"layers.0.attention.{name}" for name in ("wq", "wv", "wo")]
    assert found.skipped == (
        "layers.0.attention.wk",
        *(f"layers.1.{name}" for name in NAMES[:4]),
        *(f"layers.1.feed_forward.w{number}" for number in (1, 2, 3)),
    )
    assert found.uneven == {
        "layers.0.feed_forward.w1": (200, 64),
        "layers.0.feed_forward.w2": (64, 200),
        "layers.0.feed_forward.w3": (200, 64),
        "output": (100, 64),
    }
    # Many are counted.
    assert str(found) == "3 linear layers, not layers.0.attention.wk, layers.1.attention.wq, 10 more"


@pytest.mark.parametrize(
    ("skipped", "uneven", "text"),
    [
        ((), {}, "1 linear layers"),
        (("a",), {"b": (3, 5)}, "1 linear layers, not a, b (3×5)"),
        (("a", "b"), {"c": (3, 5)}, "1 linear layers, not a, b, c (3×5)"),
        (("a", "b", "c"), {"d": (3, 5)}, "1 linear layers, not a, b, 2 more"),
    ],
)
def test_a_conversion_in_one_line(skipped, uneven, text):
    assert str(Conversion(converted={"x": (16, 16)}, skipped=skipped, uneven=uneven)) == text


def test_a_pattern_skips_by_steps_of_a_path():
    config = Float8Rowwise(skip=["w2", "layers.1"])
    assert [
        name for name in ("layers.0.w1", "layers.0.w2", "layers.1.w1", "layers.10.w1", "w22") if config.skips(name)
    ] == [*["layers.0.w2", "layers.1.w1"]]


def test_products_are_those_of_the_converted_layers():
    account = model_of(layers=1)
    eights = "float8_e4m3fn"
    products = Float8Rowwise(skip=["output", "feed_forward"]).products(account)
    assert list(products) == [f"layers.0.{name}" for name in NAMES[:4]]
    assert set(products.values()) == {
        ProductFormat(forward=eights, input_gradient=eights, weight_gradient=eights, cast_bytes=10.0, cast_kernels=4)
    }
    assert Float8Rowwise().product_bits() == 8


@pytest.mark.parametrize(
    ("config", "device", "text"),
    [
        (Float8Rowwise(), "cpu", "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(), H100, "float8_rowwise: 7 linear layers, not output"),
        (Float8Rowwise(), A100, "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(emulate="true"), H100, "float8_rowwise: 7 linear layers, not output, emulated"),
        (Float8Rowwise(), "NVIDIA of tomorrow", "float8_rowwise: 7 linear layers, not output"),
        (Float8Rowwise(skip=[]), H100, "float8_rowwise: 8 linear layers"),
    ],
)
def test_the_table_tells_the_layers_and_whether_they_are_emulated(config, device, text):
    accelerator = "cpu" if device == "cpu" else "cuda"
    assert config.describe(model_of(layers=1), accelerator=accelerator, device=device) == text


def test_in_a_proof_it_is_emulated_and_names_no_blocks_that_are_not_there():
    notes = []
    config = Float8Rowwise(emulate="false", skip=["output", "layers.0", "layers.7"], fp32_parts=["norm", "layers.9"])
    reduced = config.reduced(layers=2, note=notes.append)
    assert (reduced.emulate, reduced.skip, reduced.fp32_parts) == ("auto", ("output", "layers.0"), ("norm",))
    assert notes == [
        "precision=float8_rowwise is emulated: the same rounding, in 32 bits",
        "precision.skip names blocks that the reduced model lacks",
        "precision.fp32_parts names blocks that the reduced model lacks",
    ]
    assert Float8Rowwise(emulate="true").reduced(layers=2, note=notes.append).emulate == "true"
    assert config.emulated() == replace(config, emulate="true")


def test_layers_that_are_multiplied_as_one_are_all_converted_or_none():
    fused = {"model": {"fused": "true"}}
    Float8Rowwise().check(given(**fused))
    Float8Rowwise(skip=["output", "wq", "wk", "wv"]).check(given(**fused))
    with pytest.raises(ConfigError) as refused:
        Float8Rowwise(skip=["output", "wk"]).check(given(**fused))
    assert str(refused.value) == (
        "model.fused=true: multiplies wq, wk, wv as one, and precision=float8_rowwise does not convert "
        "layers.0.attention.wk; "
        "try false, or name all of them in precision.skip: wq, wk, wv"
    )


def test_without_torchao_it_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="precision=float8_rowwise: needs torchao; pip install torchao"):
        Float8Rowwise().check(given())


def test_a_model_without_the_head_in_its_list_needs_no_other_list():
    """The default names `output`, which a model with tied embeddings lacks."""
    tied = {"tied_embeddings": True}
    Float8Rowwise().check(given(model=tied))
    with pytest.raises(ConfigError, match=r"precision.skip=\[lm_head\]: lm_head fits no linear layer"):
        Float8Rowwise(skip=["lm_head"]).check(given(model=tied))

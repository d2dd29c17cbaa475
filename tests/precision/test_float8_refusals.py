"""What float8 cannot do is refused in one line, and what the line advises works."""

from dataclasses import replace

import pytest

from tests import tiny
from tests.parity.parity_rows import SCHEDULES
from titanlab.costs.layout import Layout
from titanlab.errors import ConfigError
from titanlab.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise
from titanlab.precision.mxfp8_schema import Mxfp8
from titanlab.recipe.recipe_rules import setting

A100, H100, B200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
MIG = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"


def given(*, device="cpu", layout=None, model=None, **changed):
    """The setting of a tiny recipe, changed."""
    found = setting(tiny.recipe("runs", **(model or {})))
    accelerator = "cpu" if device == "cpu" else "cuda"
    return replace(found, accelerator=accelerator, device=device, layout=Layout(**(layout or {})), **changed)


# Config and setting; how the line begins and what its cure has in it; what mends it: other keys of the config, or others
# of the setting.
WRONG = [
    # Hardware.
    (Float8Rowwise, {"emulate": "false"}, {"device": A100}, "precision.emulate=false: NVIDIA A100-SXM4-80GB is too old for float8 products: it has compute capability 8.0, they need 8.9", "precision.emulate=true", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {"device": MIG}, "precision.emulate=false: NVIDIA A100-SXM4-80GB MIG 3g.40gb is too old", "precision=bf16", {"emulate": "true"}, {}),
    (Float8Tensorwise, {"emulate": "false"}, {}, "precision.emulate=false: a CPU has no float8 products", "try auto", {"emulate": "auto"}, {}),
    (Mxfp8, {"emulate": "false"}, {}, "precision.emulate=false: a CPU has no mxfp8 products", "try auto", {"emulate": "auto"}, {}),
    (Mxfp8, {}, {"device": H100}, "precision=mxfp8: NVIDIA H100 80GB HBM3 is too old for mxfp8 products: it has compute capability 9.0, they need 10.0", "precision.emulate=true", {"emulate": "true"}, {}),
    (Mxfp8, {"emulate": "false"}, {"device": H100}, "precision.emulate=false: NVIDIA H100", "precision.emulate=true", {"emulate": "true"}, {}),
    # Dims.
    (Float8Rowwise, {"strict": True}, {"model": {"ffn_dim": 200}}, "precision.strict=true: layers.0.feed_forward.w1 is 200×64, and float8 products need multiples of 16", "try false", {"strict": False}, {}),
    (Float8Rowwise, {}, {"model": {"dim": 72, "heads": 2, "kv_heads": 1, "ffn_dim": 100}}, "precision=float8_rowwise: converts no layer: layers.0.attention.wq is 72×72", "try precision=bf16", None, None),
    (Float8Tensorwise, {}, {"layout": {"tensor": 4}, "model": {"dim": 64, "kv_heads": 2, "heads": 4}}, "parallelism.tensor=4: leaves each process 8×64 of layers.0.attention.wk, and float8 products need multiples of 16", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    (Float8Tensorwise, {}, {"layout": {"tensor": 8}, "model": {"dim": 128, "kv_heads": 8, "heads": 8, "ffn_dim": 192}}, "parallelism.tensor=8: leaves each process 24×128 of layers.0.feed_forward.w1", "try a smaller degree", {}, {"layout": {"tensor": 4}}),
    (Mxfp8, {}, {"layout": {"tensor": 2}}, "parallelism.tensor=2: leaves each process 16×64 of layers.0.attention.wk, and mxfp8 products need multiples of 32", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    (Float8Tensorwise, {}, {"device": H100, "seq_len": 33, "microbatch": 1}, "training.seq_len=33: a process has 33 tokens of a microbatch, and float8 needs multiples of 16", "try 32", {}, {"seq_len": 32}),
    (Mxfp8, {}, {"seq_len": 40, "microbatch": 1}, "training.seq_len=40: a process has 40 tokens of a microbatch, and mxfp8 needs multiples of 32", "try 32", {}, {"seq_len": 32}),
    # Names.
    (Float8Rowwise, {"skip": ["output", "wz"]}, {}, "precision.skip=[output,wz]: wz fits no linear layer", "there are wq, wk, wv, wo, w1, w2, w3, output", {"skip": ["output", "wk"]}, {}),
    (Float8Rowwise, {"skip": ["*"]}, {}, "precision.skip=[*]: names every linear layer", "try [output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"skip": [], "fp32_parts": ["head"]}, {}, "precision.fp32_parts=[head]: output has output, which multiplies in float8", "precision.skip=[output]", {"skip": ["output"]}, {}),
    (Float8Rowwise, {"fp32_parts": ["layers.0"]}, {}, "precision.fp32_parts=[layers.0]: layers.0 has layers.0.attention.wq", "precision.skip=[output,layers.0]", {"skip": ["output", "layers.0"]}, {}),
    # All-gather in float8.
    (Float8Tensorwise, {}, {"cpu_offload": True, "layout": {"shard": 2}}, "precision.all_gather=true: computes scales where the weights rest", "try false", {"all_gather": False}, {}),
    (Float8Tensorwise, {}, {"layout": {"shard": 3}}, "precision.all_gather=true: cannot cut the 64 rows that a process has of layers.0.attention.wq into 3 equal parts", "try false", {"all_gather": False}, {}),
    (Float8Tensorwise, {}, {"layout": {"shard": 24, "tensor": 2}, "model": {"kv_heads": 4}}, "precision.all_gather=true: cannot cut the 32 rows", "try false", {"all_gather": False}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "where", "begins", "cure", "mended", "elsewhere"),
    WRONG,
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_work_is_refused_and_mended(kind, config, where, begins, cure, mended, elsewhere):
    with pytest.raises(ConfigError) as refused:
        kind(**config).check(given(**where))
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(begins)
    assert cure in line.rpartition("; ")[2]
    if mended is not None:
        kind(**{**config, **mended}).check(given(**{**where, **elsewhere}))


def test_a_precision_without_halves_is_refused_under_schedules_that_want_them(tmp_path):
    """Whatever computes weights' gradients later, a list by hand too; the others know how."""
    layout = {"pipeline": 2, "layers": 4, "global_batch": 4, "microbatch": 1}
    for name in ("zbv", "interleaved_zero_bubble", "dualpipe_v", "csv"):
        schedule = SCHEDULES[name]
        rule = f"computes gradients of weights with those of inputs, which schedule={schedule.kind} wants apart"
        with pytest.raises(ConfigError, match=f"precision=mxfp8: {rule}; try schedule=interleaved_1f1b"):
            tiny.recipe(tmp_path, **layout, precision=Mxfp8(), pipeline_schedule=schedule)
        tiny.recipe(tmp_path, **layout, precision=Float8Rowwise(), pipeline_schedule=schedule)
    for name in ("gpipe", "interleaved_1f1b", "looped_bfs"):
        tiny.recipe(tmp_path, **layout, precision=Mxfp8(), pipeline_schedule=SCHEDULES[name])


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
    Float8RowwiseWithGwHp().check(given(device=H100, seq_len=33, microbatch=1))


@pytest.mark.parametrize(
    ("config", "capability", "emulated"),
    [
        (Float8Rowwise(), None, True),
        (Float8Rowwise(), (8, 0), True),
        (Float8Rowwise(), (8, 9), False),
        (Float8Rowwise(), (10, 0), False),
        (Float8Rowwise(emulate="true"), (9, 0), True),
        (Float8Rowwise(emulate="false"), (8, 0), False),
        (Mxfp8(), None, True),
        (Mxfp8(), (9, 0), False),
        (Mxfp8(emulate="true"), (9, 0), True),
    ],
)
def test_where_it_is_emulated(config, capability, emulated):
    assert config.emulates(capability) == emulated

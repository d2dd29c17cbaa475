"""mxfp8's rules: its GPUs, its blocks of 32, and what torchao's prototype cannot do."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.precision.conftest import given, model_of, setting_is_refused_and_mended
from tests.prove.parity_rows import SCHEDULES
from titanlab.errors import ConfigError
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Mxfp8

H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"

# As in the tests of the schemas' base: fields and setting; how the line begins, its cure; what mends it.
WRONG = [
    ({"emulate": "false"}, {}, "precision.emulate=false: a CPU has no mxfp8 products", "try auto", {"emulate": "auto"}, {}),
    ({}, {"device": H100}, "precision=mxfp8: NVIDIA H100 80GB HBM3 is too old for mxfp8 products: it has compute capability 9.0, they need 10.0", "precision.emulate=true", {"emulate": "true"}, {}),
    ({"emulate": "false"}, {"device": H100}, "precision.emulate=false: NVIDIA H100", "precision.emulate=true", {"emulate": "true"}, {}),
    ({}, {"layout": {"tensor": 2}}, "parallelism.tensor=2: leaves each process 16×64 of layers.0.attention.wk, and mxfp8 products need multiples of 32", "precision.skip=[output,wk]", {"skip": ["output", "wk", "wv"]}, {}),
    ({}, {"seq_len": 40, "microbatch": 1}, "training.seq_len=40: a process has 40 tokens of a microbatch, and mxfp8 needs multiples of 32", "try 32", {}, {"seq_len": 32}),
    # On a GPU that multiplies in it, too.
    ({}, {"device": B200, "seq_len": 48, "microbatch": 1}, "training.seq_len=48: a process has 48 tokens of a microbatch, and mxfp8 needs multiples of 32", "try 64", {}, {"seq_len": 64}),
    ({}, {"model": {"fused": True}}, "model.fused=true: multiplies the weights of several layers as one", "try false", {}, {"model": {"fused": False}}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "where", "begins", "cure", "mended", "elsewhere"), WRONG)
def test_what_cannot_work_is_refused_and_mended(config, where, begins, cure, mended, elsewhere):
    setting_is_refused_and_mended(Mxfp8, config, where, begins, cure, mended, elsewhere)


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


@pytest.mark.parametrize(
    ("config", "capability", "emulated"),
    [
        (Mxfp8(), None, True),
        (Mxfp8(), (9, 0), False),
        (Mxfp8(emulate="true"), (9, 0), True),
    ],
)
def test_where_it_is_emulated(config, capability, emulated):
    assert config.emulates(capability) == emulated


def test_a_blackwell_gpu_multiplies_in_it():
    Mxfp8().check(given(device=B200))
    said = Mxfp8(skip=[]).describe(model_of(layers=1), accelerator="cuda", device=B200)
    assert said == "mxfp8: 8 linear layers"

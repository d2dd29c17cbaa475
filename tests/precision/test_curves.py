"""A hundred steps on real text: no precision learns otherwise than fp32.

The bands are relative to fp32's losses with the same model, seed and data: that of single steps is one of rounding that
has grown for a hundred steps, that of the mean of the last twenty is what is lost for good. In 16 bits 0.2 % and 0.01 %
were measured for bf16, 0.1 % and 0.004 % for fp16, 0.5 % and 0.07 % for bf16_full; in float8, emulated (torch 2.13.0,
torchao 0.18.0, on 2026-11-21): tensorwise 1.1 % and 0.05 %, in two processes 1.1 % and −0.14 %; rowwise 1.7 % and
−0.47 %; rowwise_with_gw_hp 1.7 % and −0.39 %; mxfp8 1.9 % and −0.43 %. Twice to four times as much is allowed, since
another CPU sums in another order; another seed ends 0.4 % away.
"""

import os

import pytest

from tests import tiny
from titanlab.data import source
from titanlab.data.schema import Stdlib
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16, Fp32
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8

pytestmark = pytest.mark.full
STEPS = 100
# The last steps, whose mean says where a curve has arrived: single batches differ by more than precisions do.
LAST = 20
TEXT = Stdlib(vocab_size=512, validation_fraction=0.0)
# Dims are multiples of 16, as float8 wants them; 0.2 M parameters, as float16 is slow on a CPU (3 GFLOP/s). With Adam's
# usual eps an element whose gradient is nothing but rounding moves as far as any other.
RECIPE = {
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 192,
    "vocab_size": 512,
    "data": TEXT,
    "steps": STEPS,
    "seq_len": 128,
    "global_batch": 8,
    "lr": 3e-3,
    "eps": 1e-5,
    "log_every": STEPS,
    "at_end": False,
    "schedule": tiny.Schedule(warmup_steps=10),
}
FLOAT8 = (0.04, 0.01)


def trained(cache, made, run):
    os.environ["TITANLAB_CACHE"] = cache
    return parity.trace(made, run, joined(os.environ) or ALONE).losses


@pytest.fixture(scope="module")
def curves(pool, tmp_path_factory):
    """`curves(precision, **layout)`: a hundred losses, each trained once."""
    folder, known = tmp_path_factory.mktemp("curves"), {}
    source.prepare(TEXT, report=lambda line: None)

    def losses(precision, **layout):
        key = repr((precision, layout))
        if key not in known:
            given = {**RECIPE, "name": f"curve-{len(known)}", "precision": precision, **layout}
            made = tiny.recipe(folder, **given)
            known[key] = pool.run(made.world, trained, os.environ["TITANLAB_CACHE"], made, tiny.begin(made))[0]
        return known[key]

    return losses


def test_there_is_something_to_learn(curves):
    losses = curves(Fp32())
    assert losses[0] == pytest.approx(6.25, abs=0.05)
    assert losses[-1] < 4.5


@pytest.mark.parametrize(
    ("precision", "layout", "largest", "final"),
    [
        (Bf16(), {}, 0.005, 0.001),
        (Bf16(reduce="bf16", fp32_parts=["embedding", "head"]), {}, 0.005, 0.001),
        (Fp16(), {}, 0.005, 0.001),
        (Fp16(growth_interval=25), {}, 0.005, 0.001),
        (Bf16Full(), {}, 0.01, 0.002),
        (Bf16Full(reduce="bf16"), {}, 0.01, 0.002),
        (Float8Tensorwise(), {}, *FLOAT8),
        (Float8Tensorwise(), {"shard": 2}, *FLOAT8),
        *((each, {}, *FLOAT8) for each in (Float8Rowwise(), Float8RowwiseWithGwHp(), Mxfp8())),
    ],
)
def test_a_precision_learns_as_fp32_does(curves, precision, layout, largest, final):
    reference, losses = curves(Fp32()), curves(precision, **layout)
    assert max(abs(b - a) / a for a, b in zip(reference, losses, strict=True)) <= largest
    assert abs(sum(losses[-LAST:]) / sum(reference[-LAST:]) - 1) <= final
    assert losses[-1] < losses[0] * 0.75
    if precision.layer_class:
        # It did compute in float8: its rounding is seen at once.
        assert losses[0] != curves(Bf16())[0]

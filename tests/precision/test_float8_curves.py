"""A hundred steps on real text: float8, emulated, learns as fp32 does, within stated bands.

The band of the last 20 steps' mean is 1 %, twice the largest that was measured: 0.04 of the 2.1 nats that are learnt.
That of single steps is 4 %, twice the largest again. Measured on 2026-11-21 (torch 2.13.0, torchao 0.18.0), largest and
final: tensorwise 1.1 % and 0.05 %, in two processes 1.1 % and −0.14 %; rowwise 1.7 % and −0.47 %; rowwise_with_gw_hp 1.7 %
and −0.39 %; mxfp8 1.9 % and −0.43 %; beside them bf16 0.2 % and −0.01 %, and fp32 from another seed 0.43 % at the end.
"""

import pytest

from tests import tiny
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8

FINAL = 0.01
LARGEST = 0.04
RUNS = [
    (Float8Tensorwise(), {}),
    (Float8Tensorwise(), {"shard": 2}),
    (Float8Rowwise(), {}),
    (Float8RowwiseWithGwHp(), {}),
    (Mxfp8(), {}),
]


@pytest.mark.full
@pytest.mark.parametrize(("precision", "layout"), RUNS, ids=[f"{each.kind} {layout or ''}" for each, layout in RUNS])
def test_it_learns_as_fp32_does(curves, precision, layout):
    losses, gap = curves(precision, **layout), curves.gap(precision, **layout)
    assert abs(gap.final) < FINAL, gap
    assert gap.largest < LARGEST, gap
    # It did compute in float8: which modules do is in test_float8; here, that their rounding is seen at once.
    assert losses[0] != curves(tiny.Bf16())[0]
    # And it has learnt.
    assert losses[-1] < losses[0] * 0.75

"""Every layout trains in float8 as one process does.

Where each forward pass sees one sequence, ranks that share out sequences, parameters or stages cast the same numbers with
the same scales as one process: what is left is the order of sums in 32 bits, 1e-5 as for fp32. Weights gathered in
float8 have the scale of the whole, so that this holds with and without float8 all-gather.

Tensor and context parallelism cut what is cast: partial products are rounded to bfloat16 before they are summed, and each
rank scales its part; and inductor rounds to bfloat16 at other places. There the difference from one process is held to
1.5 times float8's own distance from fp32: two roundings of one truth are √2 of it apart, and a gradient that is missing
or of another weight is 1 or more away.
"""

import os

import pytest

from tests import tiny
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveOp
from titanlab.techniques.precision.cast_schema import Fp32
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8
from titanlab.techniques.schedule.published_schema import ZBV

BAR = 1e-5
NOISE = 1.5
COMMON = {"layers": 4, "kv_heads": 4, "steps": 3, "global_batch": 4, "microbatch": 1, "seq_len": 32, "eps": 1e-6,
          "at_end": False}  # fmt: skip
TENSOR = Float8Tensorwise()
PLAIN = Float8Tensorwise(all_gather=False)
ROW, ROW_HP, MX = Float8Rowwise(), Float8RowwiseWithGwHp(), Mxfp8()
COMPILED = {"blocks": True, "backend": "aot_eager"}


def row(precision, name="", *, always=False, **layout):
    """`always`: also in `make test`."""
    marks = [] if always else [pytest.mark.full]
    label = ", ".join(filter(None, (precision.kind, name, *(f"{k}={v}" for k, v in layout.items() if type(v) is int))))
    return pytest.param(precision, layout, id=label, marks=marks)


EXACT = [
    row(TENSOR, shard=2, always=True),
    row(PLAIN, "plain gather", shard=2),
    row(ROW, shard=2),
    row(ROW_HP, shard=2),
    row(MX, shard=2),
    row(TENSOR, shard=4),
    row(TENSOR, replicate=2),
    row(TENSOR, replicate=2, shard=2),
    row(TENSOR, pipeline=2),
    row(TENSOR, "zbv", pipeline=2, pipeline_schedule=ZBV()),
    row(TENSOR, "zbv", pipeline=2, shard=2, pipeline_schedule=ZBV()),
    row(ROW, "zbv", pipeline=2, pipeline_schedule=ZBV()),
    row(TENSOR, "compiled", **COMPILED),
    row(TENSOR, "compiled", shard=2, **COMPILED),
    row(ROW, "compiled", shard=2, **COMPILED),
    row(TENSOR, "checkpointed", shard=2, ac=FullCheckpointing()),
    row(TENSOR, "checkpointed and compiled", shard=2, ac=FullCheckpointing(), **COMPILED),
    row(TENSOR, "chosen operations", shard=2, ac=SelectiveOp(), **COMPILED),
    row(ROW, "chosen operations", ac=SelectiveOp()),
    row(TENSOR, "tied", shard=2, tied_embeddings=True),
    # Weights that are multiplied as one have one scale, gathered in float8 or not.
    row(TENSOR, "fused", shard=2, fused=True),
    row(TENSOR, "fused and compiled", shard=2, fused=True, **COMPILED),
    row(ROW, "fused, zbv", pipeline=2, fused=True, pipeline_schedule=ZBV()),
]
NOISY = [
    row(TENSOR, tensor=2),
    row(PLAIN, "plain gather", tensor=2),
    row(TENSOR, tensor=2, sequence_parallel=False),
    row(ROW, tensor=2),
    row(ROW_HP, tensor=2),
    row(MX, tensor=2),
    row(TENSOR, context=2),
    row(ROW_HP, context=2),
    row(TENSOR, "compiled", tensor=2, **COMPILED),
    row(TENSOR, tensor=2, context=2),
    # What inductor fuses it rounds to bfloat16 once, at the end.
    row(TENSOR, "by inductor", shard=2, blocks=True, backend="inductor"),
    row(TENSOR, "zbv", pipeline=2, tensor=2, pipeline_schedule=ZBV()),
    row(TENSOR, "fused", fused=True),
    row(ROW, "fused", tensor=2, fused=True),
]
# Against one column of tensor-parallel ranks instead of one process: exact again.
BESIDE = [
    row(TENSOR, shard=2, tensor=2),
    row(PLAIN, "plain gather", shard=2, tensor=2),
    row(ROW, "compiled", shard=2, tensor=2, **COMPILED),
    row(TENSOR, "zbv", pipeline=2, tensor=2, pipeline_schedule=ZBV()),
]


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


@pytest.fixture(scope="module")
def train(pool, tmp_path_factory):
    """Traces of rank 0, each trained once."""
    known = {}

    def train(precision, **given):
        key = repr((precision, sorted(given.items(), key=str)))
        if key not in known:
            made = tiny.recipe(tmp_path_factory.mktemp("run"), precision=precision, **{**COMMON, **given})
            known[key] = pool.run(made.world, traced, made, tiny.begin(made))[0]
        return known[key]

    return train


def of_model(layout):
    return {key: value for key, value in layout.items() if key in ("tied_embeddings", "fused")}


@pytest.mark.parametrize(("precision", "layout"), EXACT)
def test_a_layout_casts_as_one_process(train, precision, layout):
    difference = compare(train(precision, **of_model(layout)), train(precision, **layout))
    assert difference.largest <= BAR, difference


@pytest.mark.parametrize(("precision", "layout"), NOISY)
def test_a_layout_that_cuts_what_is_cast_is_as_near_as_float8_is(train, precision, layout):
    alone, exact = train(precision), train(Fp32())
    noise, difference = compare(exact, alone), compare(alone, train(precision, **layout))
    # Itself no noise of the size of what it is to find.
    assert 0.01 < noise.gradient[0] < 0.3, noise
    assert difference.gradient[0] <= NOISE * noise.gradient[0], (difference, noise)
    assert difference.parameter[0] <= NOISE * noise.parameter[0], (difference, noise)
    # Losses and norms are sums of many roundings: their noise is small, and one sample of it says little.
    assert difference.loss <= 1e-3
    assert difference.grad_norm <= 1e-2


@pytest.mark.parametrize(("precision", "layout"), BESIDE)
def test_what_is_cut_by_tensor_parallelism_is_cast_alike_beside_another_axis(train, precision, layout):
    difference = compare(train(precision, tensor=2), train(precision, **layout))
    assert difference.largest <= BAR, difference

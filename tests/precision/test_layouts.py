"""In few bits every layout trains as one process of the same precision.

Another layout sums in another order, and in few bits it rounds otherwise. Two runs that round independently are √2 times
as far from each other as one of them is from exact. So twice the distance between one process of the precision and
one in fp32, which is measured here, is allowed, for losses, gradient norms, the first step's gradients and the final
parameters each. Gradients that are summed over the wrong ranks, or a part in the wrong dtype, are much farther away.

Float8 rounds equally in many layouts. Where each forward pass sees one sequence, ranks that share out sequences,
parameters or stages cast the same numbers with the same scales as one process: what is left is the order of sums in 32
bits, 1e-5 as for fp32. Weights gathered in float8 have the scale of the whole, so that this holds with and without
float8 all-gather. Tensor and context parallelism cut what is cast: partial products are rounded to bfloat16 before they
are summed, and each rank scales its part; and inductor rounds to bfloat16 at other places. There the difference from one
process is held to 1.5 times float8's own distance from fp32.
"""

import pytest

from tests.cover import cover, marks
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveOp
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16, Fp32
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8
from titanlab.techniques.schedule.published_schema import ZBV

BAR = 1e-5
ROUNDINGS, FLOAT8_ROUNDINGS = 2.0, 1.5
COMMON = {"layers": 4, "steps": 3, "seq_len": 32, "eps": 1e-6, "at_end": False}
IN_16_BITS = {"global_batch": 8, "rounding": "nearest"}
IN_8_BITS = {"global_batch": 4, "microbatch": 1, "kv_heads": 4}
# What a reference has in common with its layout.
OF_MODEL = ("tied_embeddings", "fused")
PRECISIONS = {
    "bf16": Bf16(),
    "bf16, reduced in bf16": Bf16(reduce="bf16"),
    "bf16, edges in fp32": Bf16(fp32_parts=["embedding", "head"]),
    "bf16, blocks in fp32": Bf16(fp32_parts=["layers.1", "norm"]),
    "fp16": Fp16(),
    "fp16, reduced in fp16": Fp16(reduce="fp16"),
    "fp16, edges in fp32": Fp16(fp32_parts=["embedding", "head"]),
    # To the nearest: what is rounded stochastically differs with the layout.
    "bf16_full": Bf16Full(),
}
LAYOUTS = {
    "fsdp": {"shard": 2},
    "ddp": {"replicate": 2},
    "hsdp, accumulation": {"replicate": 2, "shard": 2, "microbatch": 1},
    "tp": {"tensor": 2},
    "fsdp-tp": {"shard": 2, "tensor": 2},
    "pp": {"pipeline": 2, "microbatch": 2},
    "cp": {"context": 2},
    "tied, fsdp": {"shard": 2, "tied_embeddings": True},
    "tied, tp": {"tensor": 2, "tied_embeddings": True},
}
ALWAYS = {("bf16, edges in fp32", "pp")}
ROWS = [
    *[(precision, layout) for precision in ("bf16", "fp16") for layout in ("fsdp", "tp", "fsdp-tp", "pp", "cp")],
    *[("bf16, edges in fp32", each) for each in ("fsdp", "tp", "fsdp-tp", "pp", "cp", "tied, fsdp", "tied, tp")],
    *[("fp16, edges in fp32", each) for each in ("ddp", "fsdp-tp", "pp")],
    *[("bf16, blocks in fp32", each) for each in ("fsdp-tp", "pp", "cp")],
    *[("bf16, reduced in bf16", each) for each in ("hsdp, accumulation", "fsdp-tp")],
    *[("fp16, reduced in fp16", each) for each in ("ddp", "hsdp, accumulation")],
    *[("fp16", "ddp"), ("fp16", "hsdp, accumulation"), ("fp16", "tied, tp")],
    *[("bf16_full", each) for each in ("fsdp", "ddp", "fsdp-tp", "pp", "cp")],
]


def options(row):
    """The precision with its variant, and the layout's axes and other options."""
    precision, layout = row
    return [precision, *LAYOUTS[layout]]


COVERING = cover(ROWS, options, always=ALWAYS, cost=lambda row: 1)


TENSOR = Float8Tensorwise()
PLAIN = Float8Tensorwise(all_gather=False)
ROW, ROW_HP, MX = Float8Rowwise(), Float8RowwiseWithGwHp(), Mxfp8()
COMPILED = {"blocks": True, "backend": "aot_eager"}


def float8(precision, name="", *, always=False, **layout):
    """`always`: also in `make test`."""
    marks = [] if always else [pytest.mark.full]
    label = ", ".join(filter(None, (precision.kind, name, *(f"{k}={v}" for k, v in layout.items() if type(v) is int))))
    return pytest.param(precision, layout, id=label, marks=marks)


EXACT = [
    float8(TENSOR, shard=2, always=True),
    float8(PLAIN, "plain gather", shard=2),
    float8(ROW, shard=2),
    float8(ROW_HP, shard=2),
    float8(MX, shard=2),
    float8(TENSOR, replicate=2, shard=2),
    float8(TENSOR, "zbv", pipeline=2, shard=2, pipeline_schedule=ZBV()),
    float8(TENSOR, "compiled", shard=2, **COMPILED),
    float8(TENSOR, "checkpointed and compiled", shard=2, ac=FullCheckpointing(), **COMPILED),
    float8(TENSOR, "chosen operations", shard=2, ac=SelectiveOp(), **COMPILED),
    float8(TENSOR, "tied", shard=2, tied_embeddings=True),
    # Weights that are multiplied as one have one scale, gathered in float8 or not.
    float8(TENSOR, "fused and compiled", shard=2, fused=True, **COMPILED),
    float8(ROW, "fused, zbv", pipeline=2, fused=True, pipeline_schedule=ZBV()),
]
NOISY = [
    float8(TENSOR, tensor=2),
    float8(PLAIN, "plain gather", tensor=2),
    float8(ROW, tensor=2),
    float8(MX, tensor=2),
    float8(ROW_HP, context=2),
    float8(TENSOR, "compiled", tensor=2, **COMPILED),
    float8(TENSOR, tensor=2, context=2),
    # What inductor fuses it rounds to bfloat16 once, at the end.
    float8(TENSOR, "by inductor", shard=2, blocks=True, backend="inductor"),
    float8(TENSOR, "zbv", pipeline=2, tensor=2, pipeline_schedule=ZBV()),
    float8(ROW, "fused", tensor=2, fused=True),
]
# Against one column of tensor-parallel ranks instead of one process: exact again.
BESIDE = [
    float8(TENSOR, shard=2, tensor=2),
    float8(PLAIN, "plain gather", shard=2, tensor=2),
    float8(ROW, "compiled", shard=2, tensor=2, **COMPILED),
    float8(TENSOR, "zbv", pipeline=2, tensor=2, pipeline_schedule=ZBV()),
]


@pytest.fixture
def train(traces):
    return lambda precision, common, **given: traces(**{**COMMON, **common, "precision": precision, **given})


@pytest.mark.parametrize(
    ("precision", "layout"),
    [pytest.param(*row, marks=marks(row, always=ALWAYS, covering=COVERING)) for row in ROWS],
)
def test_a_layout_trains_as_one_process(train, precision, layout):
    model = {key: value for key, value in LAYOUTS[layout].items() if key in OF_MODEL}
    exact, alone = train(Fp32(), IN_16_BITS, **model), train(PRECISIONS[precision], IN_16_BITS, **model)
    found = train(PRECISIONS[precision], IN_16_BITS, **LAYOUTS[layout])
    rounding, difference = compare(exact, alone), compare(alone, found)
    # A precision that rounds nothing would allow anything.
    assert rounding.gradient[0] > 1e-4
    assert difference.loss <= ROUNDINGS * rounding.loss, (difference, rounding)
    assert difference.grad_norm <= ROUNDINGS * rounding.grad_norm, (difference, rounding)
    assert difference.gradient[0] <= ROUNDINGS * rounding.gradient[0], (difference, rounding)
    assert difference.parameter[0] <= ROUNDINGS * rounding.parameter[0], (difference, rounding)


def test_parts_in_fp32_are_nearer_to_fp32(train):
    """With all pieces in float32 only what goes from piece to piece is rounded."""
    exact = train(Fp32(), IN_16_BITS)
    plain, every = (compare(exact, train(precision, IN_16_BITS)) for precision in (Bf16(), Bf16(fp32_parts=["*"])))
    assert every.gradient[0] < plain.gradient[0]
    assert every.grad_norm < plain.grad_norm


@pytest.mark.parametrize(("precision", "layout"), EXACT)
def test_a_layout_casts_as_one_process(train, precision, layout):
    model = {key: value for key, value in layout.items() if key in OF_MODEL}
    difference = compare(*(train(precision, IN_8_BITS, **given) for given in (model, layout)))
    assert difference.largest <= BAR, difference


@pytest.mark.parametrize(("precision", "layout"), NOISY)
def test_a_layout_that_cuts_what_is_cast_is_as_near_as_float8_is(train, precision, layout):
    alone, exact = train(precision, IN_8_BITS), train(Fp32(), IN_8_BITS)
    noise, difference = compare(exact, alone), compare(alone, train(precision, IN_8_BITS, **layout))
    # Itself no noise of the size of what it is to find.
    assert 0.01 < noise.gradient[0] < 0.3, noise
    assert difference.gradient[0] <= FLOAT8_ROUNDINGS * noise.gradient[0], (difference, noise)
    assert difference.parameter[0] <= FLOAT8_ROUNDINGS * noise.parameter[0], (difference, noise)
    # Losses and norms are sums of many roundings: their noise is small, and one sample of it says little.
    assert difference.loss <= 1e-3
    assert difference.grad_norm <= 1e-2


@pytest.mark.parametrize(("precision", "layout"), BESIDE)
def test_what_is_cut_by_tensor_parallelism_is_cast_alike_beside_another_axis(train, precision, layout):
    difference = compare(*(train(precision, IN_8_BITS, **given) for given in ({"tensor": 2}, layout)))
    assert difference.largest <= BAR, difference

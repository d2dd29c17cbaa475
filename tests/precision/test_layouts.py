"""In 16 bits every layout trains as one process of the same precision.

Another layout sums in another order, and in few bits it rounds otherwise. Two runs that round independently are √2 times
as far from each other as one of them is from exact; so twice the distance between one process of the precision and
one in fp32, which is measured here, is allowed, for losses, gradient norms, the first step's gradients and the final
parameters each. Gradients that are summed over the wrong ranks, or a part in the wrong dtype, are much farther away.
"""

import os

import pytest

from tests import tiny
from tests.cover import cover, marks
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.prove.parity import compare
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16, Fp32

ROUNDINGS = 2.0
COMMON = {"layers": 4, "steps": 3, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}
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
ALWAYS = {("fp16", "tp"), ("bf16, edges in fp32", "pp")}
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


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


@pytest.fixture(scope="module")
def train(pool, tmp_path_factory):
    known = {}

    def run(precision, **layout):
        key = (repr(precision), *layout.items())
        if key not in known:
            keys = {**COMMON, "rounding": "nearest", "precision": precision, **layout}
            made = tiny.recipe(tmp_path_factory.mktemp("run"), **keys)
            known[key] = pool.run(made.world, traced, made, tiny.begin(made))
        return known[key]

    return run


@pytest.mark.parametrize(
    ("precision", "layout"),
    [pytest.param(*row, marks=marks(row, always=ALWAYS, covering=COVERING)) for row in ROWS],
)
def test_a_layout_trains_as_one_process(train, precision, layout):
    model = {key: value for key, value in LAYOUTS[layout].items() if key == "tied_embeddings"}
    exact, alone = train(Fp32(), **model)[0], train(PRECISIONS[precision], **model)[0]
    every = train(PRECISIONS[precision], **LAYOUTS[layout])
    assert all(each.losses == every[0].losses and each.grad_norms == every[0].grad_norms for each in every)
    rounding, difference = compare(exact, alone), compare(alone, every[0])
    # A precision that rounds nothing would allow anything.
    assert rounding.gradient[0] > 1e-4
    assert difference.loss <= ROUNDINGS * rounding.loss, (difference, rounding)
    assert difference.grad_norm <= ROUNDINGS * rounding.grad_norm, (difference, rounding)
    assert difference.gradient[0] <= ROUNDINGS * rounding.gradient[0], (difference, rounding)
    assert difference.parameter[0] <= ROUNDINGS * rounding.parameter[0], (difference, rounding)


def test_parts_in_fp32_are_nearer_to_fp32(train):
    """With all pieces in float32 only what goes from piece to piece is rounded."""
    exact = train(Fp32())[0]
    plain, every = (compare(exact, train(precision)[0]) for precision in (Bf16(), Bf16(fp32_parts=["*"])))
    assert every.gradient[0] < plain.gradient[0]
    assert every.grad_norm < plain.grad_norm

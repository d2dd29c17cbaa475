"""Whatever is computed again, training is the same: losses, norms, gradients and parameters of two steps.

In eager mode the same operations run on the same numbers in the same order, so that nothing may differ at all from
the same layout without checkpointing. Compiled with aot_eager what a budget moves into the backward pass is rounded as
before, too; the bar there is the project's for every policy, 1e-6, relative.
"""

from __future__ import annotations

import math
from itertools import product

import pytest

from tests.cover import cover, marks
from tests.prove.parity_rows import SCHEDULES
from titanlab.costs import AXES
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, MemoryBudget, SelectiveLayer, SelectiveOp

BAR = 1e-6
POLICIES = {
    "full": FullCheckpointing(),
    "selective_layer": SelectiveLayer(every=2),
    "selective_layer, kept": SelectiveLayer(every=3, keep=True),
    "selective_op": SelectiveOp(),
    "all matmuls": SelectiveOp(every_other_matmul=False),
    "one operator": SelectiveOp(saved=["aten.silu.default"]),
}
LAYOUTS = {
    "one process": {},
    "two microbatches": {"microbatch": 4},
    "fsdp": {"shard": 2},
    "fsdp, microbatches": {"shard": 2, "microbatch": 2},
    "ddp": {"replicate": 2},
    "tensor": {"tensor": 2},
    "tensor, stream whole": {"tensor": 2, "sequence_parallel": False},
    "ring": {"context": 2},
    "all_gather": {"context": 2, "context_method": "all_gather"},
    "1f1b": {"pipeline": 2, "microbatch": 2},
    "zbv": {"pipeline": 2, "microbatch": 2, "pipeline_schedule": SCHEDULES["zbv"]},
    "zbv, fsdp": {"pipeline": 2, "shard": 2, "microbatch": 1, "pipeline_schedule": SCHEDULES["zbv"]},
    "fsdp, tensor": {"shard": 2, "tensor": 2},
}
COMMON = {"layers": 4, "steps": 2, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}


def keys_of(layout, **given):
    return {**COMMON, **LAYOUTS[layout], **given}


def rows(combinations, always):
    """A product of layouts and policies; `always`: rows that `make test` runs too."""
    covering = cover(combinations, options, always=always, cost=lambda row: world(LAYOUTS[row[0]]))
    return [
        pytest.param(*row, id=f"{row[0]}: {row[1]}", marks=marks(row, always=always, covering=covering))
        for row in combinations
    ]


def options(row):
    """The axes, the schedule and the other options of a layout, and the policy."""
    layout, policy = row
    given = {**LAYOUTS[layout]}
    if "microbatch" in given:
        given["microbatch"] = "given"
    return [*(f"{key}={getattr(value, 'kind', value)}" for key, value in given.items()), policy]


def world(layout):
    return math.prod(degree for axis, degree in layout.items() if axis in AXES)


ALWAYS = {
    *(("one process", policy) for policy in POLICIES),
    ("tensor", "selective_op"),
    ("zbv", "selective_op"),
}


@pytest.mark.parametrize(("layout", "policy"), rows(list(product(LAYOUTS, POLICIES)), ALWAYS))
def test_nothing_changes_in_eager_mode(traces, layout, policy):
    found = compare(*(traces(**keys_of(layout, **given)) for given in ({}, {"ac": POLICIES[policy]})))
    assert found.largest == 0, found


COMPILED = {**POLICIES, **{f"budget {budget:g}": MemoryBudget(budget=budget) for budget in (0.0, 0.3, 0.7, 1.0)}}


# Under every layout some policies, and every policy where one process, sharding, splitting and stages meet it.
EVERYWHERE = ("full", "selective_op", "budget 0.3")
EVERY_POLICY = ("one process", "fsdp, microbatches", "tensor", "1f1b")


@pytest.mark.parametrize(
    ("layout", "policy"),
    rows(
        [row for row in product(LAYOUTS, COMPILED) if row[0] in EVERY_POLICY or row[1] in EVERYWHERE],
        [("one process", "selective_op")],
    ),
)
def test_hardly_anything_changes_in_compiled_blocks(traces, layout, policy):
    compiled = {"blocks": True, "backend": "aot_eager"}
    found = compare(*(traces(**keys_of(layout, **compiled, **given)) for given in ({}, {"ac": COMPILED[policy]})))
    assert found.largest <= BAR, found


@pytest.mark.full
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_budget_of_generated_kernels_trains_as_eager_mode_does(traces, budget):
    """The bar is that of all layouts, 1e-5: generated kernels add in another order."""
    compiled = {"blocks": True, "backend": "inductor"}
    found = compare(
        traces(**keys_of("one process")), traces(**keys_of("one process", ac=MemoryBudget(budget=budget), **compiled))
    )
    assert found.largest <= 1e-5, found

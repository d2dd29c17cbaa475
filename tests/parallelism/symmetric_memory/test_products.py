"""AsyncTP in eager mode: which products it fuses, and that gradients stay those of separate collectives.

A CPU has no symmetric memory: the fused operators are what they are defined as, a collective and a product.
"""

import os
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from tests import tiny
from tests.pool import Pool
from titanlab.ac.block_schema import FullCheckpointing
from titanlab.ac.selective_op_schema import SelectiveOp
from titanlab.compile import async_tensor
from titanlab.distributed.ranks import joined
from titanlab.model.qwen3_moe_schema import Qwen3Moe
from titanlab.model.qwen3_schema import Qwen3
from titanlab.parallelism.collectives import gather_first, sum_and_scatter_first
from titanlab.parallelism.symmetric_memory import products
from titanlab.parity import parity
from titanlab.parity.parity import compare
from titanlab.recipe.async_tensor import eager_products
from titanlab.schedule.zbv_schema import ZBV

# Sums of a product are rounded once instead of once for each joined layer.
BAR = 1e-5
COMMON = {"steps": 2, "global_batch": 4, "eps": 1e-6, "at_end": False}
SIZES = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 256}
QWEN3 = Qwen3(**SIZES, head_dim=32, ffn_dim=192)
EXPERTS = Qwen3Moe(**SIZES, head_dim=32, ffn_dim=64, experts=4, active_experts=2)


def traced(made, run, fuses):
    """A run's trace and the number of calls of each fused operator."""
    calls = Counter()

    def gather_products(part, rights, group):
        calls["gather"] += 1
        whole = gather_first(part, _resolve_process_group(group))
        return whole, [whole @ right for right in rights]

    def product_scatter(left, right, group):
        calls["scatter"] += 1
        return sum_and_scatter_first(left @ right, _resolve_process_group(group))

    made.parallelism.async_tensor = fuses
    with (
        patch.object(products, "gather_products", gather_products),
        patch.object(products, "product_scatter", product_scatter),
        patch.object(async_tensor, "register", lambda group: None),
    ):
        return parity.trace(made, run, joined(os.environ)), dict(calls)


SPLIT = {"layers": 4, "pipeline_schedule": ZBV()}
ROWS = {
    "tensor": ({"tensor": 2}, {}),
    "microbatches": ({"tensor": 2}, {"microbatch": 2}),
    "fsdp": ({"tensor": 2, "shard": 2}, {}),
    "ddp": ({"tensor": 2, "replicate": 2}, {}),
    "context": ({"tensor": 2, "context": 2}, {}),
    "split backward": ({"tensor": 2, "pipeline": 2}, SPLIT),
    "bf16": ({"tensor": 2, "shard": 2}, {"bf16": True}),
    "recomputed": ({"tensor": 2}, {"ac": FullCheckpointing()}),
    "selected": ({"tensor": 2}, {"ac": SelectiveOp()}),
    "qwen3": ({"tensor": 2}, {"model": QWEN3}),
    "experts": ({"tensor": 2}, {"model": EXPERTS}),
    "expert": ({"tensor": 2, "shard": 2, "expert": 4}, {"model": EXPERTS}),
    "joined": ({"tensor": 2, "shard": 2}, {"fused": True}),
    "joined, split backward": ({"tensor": 2, "pipeline": 2}, {"fused": True, **SPLIT}),
}
QUICK = ("tensor",)


@pytest.mark.parametrize("row", [pytest.param(row, marks=[] if row in QUICK else pytest.mark.full) for row in ROWS])
def test_gradients_are_those_of_separate_collectives(pool, tmp_path, row):
    layout, given = ROWS[row]
    world, traces = 1, []
    for degree in (degree for axis, degree in layout.items() if axis != "expert"):
        world *= degree
    for fuses in (False, True):
        made = tiny.recipe(tmp_path, name=f"run-{fuses}", **COMMON, **layout, **given)
        run = tiny.begin(made)
        traces.append(pool.run(world, traced, made, run, fuses)[0])
    (plain, none), (fused, calls) = traces
    assert none == {}
    found = compare(plain, fused)
    # bf16 has 8 bits of mantissa.
    assert found.largest <= (2**-7 if given.get("bf16") else BAR), found
    layers = eager_products(made)
    passes = COMMON["steps"] * made.microbatches
    blocks = made.model.layers // layout.get("pipeline", 1)
    gathering, scattering = (len(each) // made.model.layers * blocks * passes for each in layers)
    if row not in ("recomputed", "selected"):
        # The backward of each is the other one.
        assert calls == {"gather": gathering + scattering, "scatter": scattering + gathering}
    assert gathering > 0
    assert scattering > 0


def fused_operators():
    """Results and gradients of torch's operators, where a CPU has torch's own definition of them."""
    dist.init_process_group("gloo")
    library = torch.library.Library("symm_mem", "IMPL")
    module = torch.distributed._symmetric_memory
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(module, f"_{name}_fallback"), "CPU")
    torch.manual_seed(dist.get_rank())
    group = dist.group.WORLD
    part, right, left = torch.randn(3, 4), torch.randn(4, 5), torch.randn(6, 4)
    whole, (output, again) = products.gather_products(part, [right, 2 * right], group.group_name)
    scattered = products.product_scatter(left, right, group.group_name)
    torch.testing.assert_close(whole, gather_first(part, group))
    torch.testing.assert_close(output, gather_first(part, group) @ right)
    torch.testing.assert_close(again, 2 * output)
    torch.testing.assert_close(scattered, sum_and_scatter_first(left @ right, group))


def test_the_operators_are_called_as_torch_defines_them(request):
    # In workers that end with it: a process keeps what a library registers.
    workers = Pool(2, warning_filters=request.config.getini("filterwarnings"))
    try:
        workers.run(2, fused_operators)
    finally:
        workers.close()

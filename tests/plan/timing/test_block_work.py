"""What the planner times of a block is what its operations say."""

import pytest

from titanlab.plan.block_time import RankWork, work_of
from titanlab.techniques.model.llama_schema import Llama

CONFIG = {"dim": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "vocab_size": 64}


def forward_kernels(*, fused, tensor):
    """Kernels of the products that may be fused."""
    model = Llama(**CONFIG, fused=fused)
    part = RankWork(tensor=tensor, context=1, sequence_parallel=False, expert=1, dtype="bfloat16", width=2, fused=False,
                plan=model.account().plan, prefix="layers.0.", products={})  # fmt: skip
    operations = model.block_operations(batch=2, seq_len=256)
    names = ("wq", "wk", "wv", "wqkv", "w1", "w3", "w13")
    chosen = [each for each in operations if each.name.rpartition(".")[2] in names]
    return [kernel for work in work_of(chosen, part) for kernel in work[2]]


@pytest.mark.parametrize("tensor", [1, 2])
def test_fused_projections_are_fewer_products_and_a_copy_of_their_weights(tensor):
    apart, fused = (forward_kernels(fused=fused, tensor=tensor) for fused in (False, True))
    products, copies = [kernel for kernel in fused if kernel.flops], [kernel for kernel in fused if not kernel.flops]
    assert (len(apart), len(products), len(copies)) == (5, 2, 2)
    rows = 128 + 64 + 64 + 256 + 256
    assert sum(kernel.moved for kernel in copies) == 2 * 2 * rows * 128 / tensor
    # Tiles at the edges are counted whole, so that one product computes no more than several.
    assert sum(kernel.flops for kernel in products) <= sum(kernel.flops for kernel in apart)

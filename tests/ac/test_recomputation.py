"""What is computed again is computed again, and what is kept is not: counted, operator by operator."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.activation_memory import build, inputs
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.model.llama_schema import Llama

LAYERS = 3
CONFIG = Llama(dim=64, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=96, vocab_size=64)
MM, ATTENTION, SILU = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.silu.default"
PRODUCTS = 7  # of a block's forward: q, k, v, o, gate, up, down
# Each has two more in its backward.


class Count(TorchDispatchMode):
    """How often which operator runs."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.of[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def repeated(policy, *, microbatches=1, config=CONFIG):
    """How often the backward passes of some microbatches, all in flight at once, repeat a product, attention, silu."""
    stack = build(config, policy, torch.float32)
    given = inputs(config, batch=2, seq=16, dtype=torch.float32)
    losses = []
    for _ in range(microbatches):
        with Count() as forward:
            losses.append(stack(*given).sum())
        assert (forward.of[MM], forward.of[ATTENTION], forward.of[SILU]) == (PRODUCTS * LAYERS, LAYERS, LAYERS)
    with Count() as backward:
        # As a pipeline runs them: first in, first out.
        for loss in losses:
            loss.backward()
    products = backward.of[MM] - 2 * PRODUCTS * LAYERS * microbatches
    return products, backward.of[ATTENTION], backward.of[SILU]


# torch stops when the last tensor that a backward needs is there: the block's last product never is one.
NEEDED = PRODUCTS - 1
CASES = {
    "none": (NoCheckpointing(), (0, 0, 0)),
    "full": (FullCheckpointing(), (NEEDED * LAYERS, LAYERS, LAYERS)),
    # Blocks 0 and 2 of three.
    "every second block": (SelectiveLayer(every=2), (NEEDED * 2, 2, 2)),
    "every third block": (SelectiveLayer(every=3), (NEEDED, 1, 1)),
    "every block": (SelectiveLayer(every=1), (NEEDED * LAYERS, LAYERS, LAYERS)),
    # Block 1 of three; blocks 1 and 2; none.
    "all but every second block": (SelectiveLayer(every=2, keep=True), (NEEDED, 1, 1)),
    "all but every third block": (SelectiveLayer(every=3, keep=True), (NEEDED * 2, 2, 2)),
    "all but every block": (SelectiveLayer(every=1, keep=True), (0, 0, 0)),
    # k, o and up.
    "the default list": (SelectiveOp(), (3 * LAYERS, 0, LAYERS)),
    "all matmuls": (SelectiveOp(every_other_matmul=False), (0, 0, LAYERS)),
    "matmuls only": (SelectiveOp(saved=[MM]), (3 * LAYERS, LAYERS, LAYERS)),
    "attention only": (SelectiveOp(saved=[ATTENTION]), (NEEDED * LAYERS, 0, LAYERS)),
    "silu only": (SelectiveOp(saved=[SILU]), (NEEDED * LAYERS, LAYERS, 0)),
}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_kept_is_computed_again(case, microbatches):
    policy, counts = CASES[case]
    assert repeated(policy, microbatches=microbatches) == tuple(count * microbatches for count in counts)


@pytest.mark.parametrize("case", CASES)
def test_the_declaration_says_the_same(case):
    policy, counts = CASES[case]
    block = CONFIG.block_operations(batch=2, seq_len=16)
    kinds = {operation.name: operation.kind for operation in block}
    again = [name for number in range(LAYERS) for name in policy.recomputed(block, number=number)]
    products = sum(kinds[name] == "matmul" for name in again)
    attention = sum(kinds[name] == "attention" for name in again)
    assert (products, attention, again.count("feed_forward.silu")) == counts


def test_which_collectives_are_repeated():
    gather, scatter = (f"_c10d_functional.{name}_tensor.default" for name in ("all_gather_into", "reduce_scatter"))
    for policy, repeats in (
        (NoCheckpointing(), (False, False)),
        (FullCheckpointing(), (True, True)),
        (SelectiveOp(), (True, False)),
    ):
        assert tuple(policy.repeats_collective(name, number=0) for name in (gather, scatter)) == repeats


def test_without_gradients_nothing_is_kept():
    stack = build(CONFIG, SelectiveOp(), torch.float32)
    given = inputs(CONFIG, batch=2, seq=16, dtype=torch.float32)
    with torch.no_grad():
        assert stack(*given).grad_fn is None


class Noisy(torch.nn.Module):
    """A block with dropout, whose forward somebody has exchanged."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.calls = 0

        def forward(hidden, *, scale):
            self.calls += 1
            return torch.nn.functional.dropout(self.linear(hidden) * scale, 0.5)

        self.forward = forward


@pytest.mark.parametrize("policy", [FullCheckpointing(), SelectiveOp()])
def test_chance_is_repeated_too(policy):
    """And a block may have a forward of its own, and arguments by name."""
    block = Noisy()
    policy.implementation().apply({0: block})
    hidden = torch.ones(4, 8, requires_grad=True)
    torch.manual_seed(0)
    output = block(hidden, scale=2.0)
    output.sum().backward()
    assert block.calls == 2
    # What dropout has let through, and only that, has a gradient: each kept element adds 2 · 2.
    kept = (output != 0).float()
    torch.testing.assert_close(block.linear.bias.grad, kept.sum(0) * 4)

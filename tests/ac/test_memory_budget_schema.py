"""ac=memory_budget: a share of a compiled block's activations, its account, and the compilers that know it."""

from __future__ import annotations

import pytest

from tests import tiny
from titanlab.costs import Share, block_input, kept_activations
from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation_schema import MemoryBudget, SelectiveOp

COMPILED = {"blocks": True, "backend": "aot_eager"}

# A policy and what else is in the recipe; how the line begins and what its cure has; what the cure makes of both.
WRONG = {
    "budget=-0.1": (lambda: {"ac": MemoryBudget(budget=-0.1)}, "ac.budget=-0.1: must lie between 0 and 1", "try 0", lambda: {"ac": MemoryBudget(budget=0.0), **COMPILED}),
    "budget=50": (lambda: {"ac": MemoryBudget(budget=50.0)}, "ac.budget=50.0: must lie between 0 and 1", "try 1", lambda: {"ac": MemoryBudget(budget=1.0), **COMPILED}),
    "budget=nan": (lambda: {"ac": MemoryBudget(budget=float("nan"))}, "ac.budget=nan: must lie between 0 and 1", "try 0.5", lambda: {"ac": MemoryBudget(budget=0.5), **COMPILED}),
    "budget, not compiled": (lambda: {"ac": MemoryBudget()}, "ac=memory_budget: is kept by the compiler, and the blocks are not compiled", "try compile=block", lambda: {"ac": MemoryBudget(), **COMPILED}),
    "budget, loss compiled only": (lambda: {"ac": MemoryBudget(), "loss": True, "backend": "aot_eager"}, "ac=memory_budget: is kept by the compiler", "or ac=selective_op", lambda: {"ac": SelectiveOp()}),
    "budget, backend=eager": (lambda: {"ac": MemoryBudget(), "blocks": True, "backend": "eager"}, "ac=memory_budget: compile.backend=eager knows no budget", "try compile.backend=inductor or aot_eager", lambda: {"ac": MemoryBudget(), **COMPILED}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_and_its_cure_cures(tmp_path, case):
    wrong, begins, cure, mended = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, **wrong())
    line = str(refused.value)
    assert line.startswith(begins)
    assert cure in line
    assert "\n" not in line
    tiny.recipe(tmp_path, **mended())


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "aot_eager_decomp_partition"])
def test_backends_with_torchs_partitioner_are_taken(tmp_path, backend):
    made = tiny.recipe(tmp_path, ac=MemoryBudget(), blocks=True, backend=backend)
    assert made.ac.compiler_budget() == 0.5


def test_the_account_lies_between_a_blocks_input_and_all_that_autograd_keeps():
    block = tiny.recipe("runs").model.block_operations(batch=2, seq_len=32)
    share = Share(element_bytes=2)

    def saved(budget):
        return MemoryBudget(budget=budget).saved_bytes(block, share, number=0)

    least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept_activations(block))
    assert (saved(0.0), saved(1.0)) == (least, most)
    assert least == 2 * 32 * 64 * 2
    assert saved(0.25) == pytest.approx(least + (most - least) / 4, abs=1)


def test_what_the_compiler_recomputes_is_not_counted_as_a_blocks_recomputation():
    """The choice is the compiler's: titanlab wraps no block and repeats no collective."""
    config = MemoryBudget(budget=0.0)
    block = tiny.recipe("runs").model.block_operations(batch=2, seq_len=32)
    assert config.recomputed(block, number=0) == ()
    assert not config.recomputes(0)
    assert config.compiler_budget() == 0.0

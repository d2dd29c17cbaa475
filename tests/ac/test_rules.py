"""What policies say and refuse: names of operators and numbers of blocks; what a line offers works."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests import tiny
from titanlab.costs import Share, block_input, kept_activations
from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation import SelectedOperators
from titanlab.techniques.ac.recomputation_schema import (
    PAPER,
    SAME,
    FullCheckpointing,
    MemoryBudget,
    NoCheckpointing,
    SelectiveLayer,
    SelectiveOp,
)

MM, SILU = "aten.mm.default", "aten.silu.default"
FULL, NONE, PRODUCTS = FullCheckpointing(), NoCheckpointing(), SelectiveOp(saved=[MM])
COMPILED = {"blocks": True, "backend": "aot_eager"}

# A policy, its fields and what else is in the recipe; how the line begins and what its cure has; what the cure makes of
# both.
WRONG = [
    (SelectiveLayer, {"every": 0}, {}, "ac.every=0: must be at least 1; try 2 for every second block, or ac=none", "", SelectiveLayer(every=2), {}),
    (SelectiveLayer, {"every": 0, "keep": True}, {}, "ac.every=0: must be at least 1", "ac=full for none", FULL, {}),
    (SelectiveLayer, {"every": 3}, {}, "ac.every=3: is more than the model's 2 blocks", "try 1", SelectiveLayer(every=1), {}),
    (SelectiveLayer, {"every": 6}, {"layers": 5}, "ac.every=6: is more than the model's 5 blocks", "try 2", SelectiveLayer(every=2), {"layers": 5}),
    (SelectiveOp, {"saved": []}, {}, "ac.saved=[]: names no operator", "try ac=full", FULL, {}),
    (SelectiveOp, {"saved": ["aten.mm"]}, {}, "ac.saved=[aten.mm]: aten.mm is not how torch prints", "try aten.mm.default", PRODUCTS, {}),
    (SelectiveOp, {"saved": ["aten::silu"]}, {}, "ac.saved=[aten::silu]: aten::silu is not how", "try aten.silu.default", SelectiveOp(saved=[SILU]), {}),
    (SelectiveOp, {"saved": [MM, MM]}, {}, "ac.saved=[aten.mm.default,aten.mm.default]: names aten.mm.default twice", "name it once", PRODUCTS, {}),
    # A slip of an operator on the list, of another, of a namespace; nothing like it; a name that stands for another.
    (SelectiveOp, {"saved": ["aten.mmm.default"]}, {}, "ac.saved=[aten.mmm.default]: torch has no operator aten.mmm.default", "try aten.mm.default", PRODUCTS, {}),
    (SelectiveOp, {"saved": ["atenn.mm.default"]}, {}, "ac.saved=[atenn.mm.default]: torch has no operator", "try aten.mm.default", PRODUCTS, {}),
    (SelectiveOp, {"saved": ["aten.qqqqqqqqqq.zzzz"]}, {}, "ac.saved=[aten.qqqqqqqqqq.zzzz]: torch has no operator", "try aten.mm.default", PRODUCTS, {}),
    (SelectiveOp, {"saved": ["titanlab.tiled_attention.default"]}, {}, "ac.saved=[titanlab.tiled_attention.default]: torch has no operator", "try ", PRODUCTS, {}),
    (MemoryBudget, {"budget": -0.1}, {}, "ac.budget=-0.1: must lie between 0 and 1", "try 0", MemoryBudget(budget=0.0), COMPILED),
    (MemoryBudget, {"budget": float("nan")}, {}, "ac.budget=nan: must lie between 0 and 1", "try 0.5", MemoryBudget(budget=0.5), COMPILED),
    (MemoryBudget, {}, {}, "ac=memory_budget: is kept by the compiler, and the blocks are not compiled", "try compile=block", MemoryBudget(), {"blocks": True}),
    (MemoryBudget, {}, {"loss": True, "backend": "aot_eager"}, "ac=memory_budget: is kept by the compiler", "or ac=selective_op", SelectiveOp(), {}),
    (MemoryBudget, {}, {"blocks": True, "backend": "eager"}, "ac=memory_budget: compile.backend=eager knows no budget", "try compile.backend=inductor or aot_eager", MemoryBudget(), {**COMPILED, "backend": "aot_eager_decomp_partition"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "others", "begins", "cure", "mended", "elsewhere"), WRONG)
def test_it_is_refused_and_its_cure_cures(tmp_path, kind, fields, others, begins, cure, mended, elsewhere):
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, ac=kind(**fields), **others)
    line = str(refused.value)
    assert line.startswith(begins)
    assert cure in line
    assert "\n" not in line
    tiny.recipe(tmp_path, ac=mended, **elsewhere)


def test_operators_of_others_are_looked_up_when_they_have_been_imported(tmp_path):
    theirs = SelectiveOp(saved=["their_package.attention.default"])
    tiny.recipe(tmp_path, ac=theirs)
    with pytest.raises(ConfigError, match="torch has no operator their_package.attention.default"):
        theirs.implementation().apply({})


def test_the_default_list_is_known():
    """To torch, once context parallelism has been imported; and a recipe with it needs no torch to be checked."""
    from titanlab.parallelism import context

    known = SelectedOperators.known_operators()
    assert set(PAPER) <= known
    # As torch prints them, with and without an overload.
    assert {str(torch.ops.aten.mm.default), str(torch.ops.aten.max.dim)} <= known
    assert context.attention is not None
    code = (
        "import sys; from types import SimpleNamespace; from titanlab.costs.layout import Layout\n"
        "from titanlab.techniques.ac.recomputation_schema import SelectiveOp\n"
        "SelectiveOp().check(SimpleNamespace(layout=Layout()))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("every", "chosen"), [(1, {0, 1, 2, 3, 4}), (2, {0, 2, 4}), (3, {0, 3}), (5, {0})])
def test_blocks_go_by_their_number_in_the_whole_model(every, chosen, keep):
    """However they are shared out over stages."""
    config = SelectiveLayer(every=every, keep=keep)
    for stages in ([[0, 1, 2, 3, 4]], [[0, 4], [1, 2, 3]], [[0, 1], [2], [3, 4]]):
        found = set()
        for numbers in stages:
            blocks = {number: torch.nn.Linear(2, 2) for number in numbers}
            config.implementation().apply(blocks)
            found |= {number for number, block in blocks.items() if "forward" in vars(block)}
        assert found == ({0, 1, 2, 3, 4} - chosen if keep else chosen)


@pytest.mark.parametrize(("every", "reduced"), [(1, 1), (2, 2), (3, 2), (100, 2)])
def test_a_smaller_model_has_blocks_of_both_sorts(every, reduced):
    notes = []
    made = SelectiveLayer(every=every, keep=True).reduced(note=notes.append)
    assert made == SelectiveLayer(every=reduced, keep=True)
    assert notes == (
        [] if every == reduced else [f"ac.every={every} is more than the reduced model's blocks, and becomes 2"]
    )


def test_the_account_of_a_budget_lies_between_a_blocks_input_and_all_that_autograd_keeps():
    """The choice is the compiler's: titanlab wraps no block and repeats no collective."""
    block, share = tiny.recipe("runs").model.block_operations(batch=2, seq_len=32), Share(element_bytes=2)
    saved = {each: MemoryBudget(budget=each).saved_bytes(block, share, number=0) for each in (0.0, 0.25, 1.0)}
    least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept_activations(block))
    assert (saved[0.0], saved[1.0]) == (least, most)
    assert saved[0.25] == pytest.approx(least + (most - least) / 4, abs=1)
    assert MemoryBudget(budget=0.0).recomputed(block, number=0) == ()
    assert MemoryBudget(budget=0.0).compiler_budget() == 0.0


@pytest.mark.parametrize(("printed", "like"), SAME.items())
def test_an_operator_that_takes_anothers_place_is_kept_as_that_is(printed, like):
    block = torch.nn.Linear(2, 2)
    for saved, kept in (((like,), "MUST_SAVE"), ((MM,), "PREFER_RECOMPUTE")):
        SelectiveOp(saved=saved).implementation().apply({0: block})
        forward, _ = block.checkpoint_contexts()
        context = type("Context", (), {"is_recompute": False})
        assert forward.policy_fn(context, printed).name == kept

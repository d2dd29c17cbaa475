"""Config of ac=selective_op: what a block keeps by the account, and which names of operators are taken."""

from __future__ import annotations

import pytest

from tests import tiny
from titanlab.costs import Activation, Operation, Operator, Share
from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation_schema import PAPER, SelectiveOp, nearest

MM, SILU, MAX = "aten.mm.default", "aten.silu.default", "aten.max.dim"
SHARE = Share(element_bytes=2)


def operation(name, operator, *, size=8, keeps=True):
    result = Activation(name=name, shape=(size,))
    kept = (Activation(name=f"{name}.in", shape=(1,)),) if keeps else ()
    return Operation(
        name=name,
        kind="matmul",
        flops=0,
        output=(10,),
        keeps=kept,
        operators=(Operator(names=operator, results=(result,)),),
    )


BLOCK = [
    operation("q", (MM,), size=1),
    operation("attention", (PAPER[2], PAPER[5]), size=2),
    operation("o", (MM,), size=4),
    operation("silu", (SILU,), size=8),
    operation("down", (MM,), size=16),
]
# Of the block's input, in two bytes.
INPUT = 20


@pytest.mark.parametrize(
    ("config", "saved", "again"),
    [
        # The first and the third product, and attention; nothing after the last operation that keeps its input.
        (SelectiveOp(), 1 + 2 + 16, ("o", "silu")),
        (SelectiveOp(every_other_matmul=False), 1 + 2 + 4 + 16, ("silu",)),
        (SelectiveOp(saved=[SILU]), 8, ("q", "attention", "o")),
        (SelectiveOp(saved=[MAX]), 0, ("q", "attention", "o", "silu")),
        (SelectiveOp(saved=[MM, SILU]), 1 + 8 + 16, ("attention", "o")),
    ],
)
def test_a_block_keeps_its_input_and_what_the_list_names(config, saved, again):
    assert config.saved_bytes(BLOCK, SHARE, number=0) == INPUT + 2 * saved
    assert config.recomputed(BLOCK, number=0) == again


def test_an_operator_of_any_device_is_enough():
    names = SelectiveOp(saved=[PAPER[2]]), SelectiveOp(saved=[PAPER[5]])
    assert [config.saved_bytes(BLOCK, SHARE, number=0) for config in names] == [INPUT + 4] * 2


def test_collectives_are_repeated_unless_they_are_named():
    assert SelectiveOp().repeats_collective("_c10d_functional.all_gather_into_tensor.default", number=0)
    assert not SelectiveOp().repeats_collective("_c10d_functional.reduce_scatter_tensor.default", number=0)


def test_names_that_stand_for_another_are_not_in_the_list():
    name = "titanlab.tiled_attention.default"
    with pytest.raises(ConfigError, match=f"torch has no operator {name}"):
        SelectiveOp(saved=[name]).check_known(frozenset([name]), all_imported=True)


def test_before_all_is_imported_only_strange_names_of_known_packages_are_refused():
    known = frozenset([MM])
    SelectiveOp(saved=["theirs.attention.default"]).check_known(known, all_imported=False)
    for name in ("aten.mn.default", "atan.mm.default"):
        with pytest.raises(ConfigError, match=rf"torch has no operator {name}; try {MM}"):
            SelectiveOp(saved=[name]).check_known(known, all_imported=False)


@pytest.mark.parametrize(("name", "similar"), [("aten.nm", "aten.mm"), ("aten.mm", "aten.mm"), ("qqqq", ""), ("", "")])
def test_the_most_similar_name(name, similar):
    assert nearest(name, {"aten.mm", "prims.sum"}) == similar


def test_of_equally_similar_names_it_is_always_the_same():
    assert {nearest("ab", frozenset(names)) for names in (("abx", "aby"), ("aby", "abx"))} == {
        nearest("ab", ("aby", "abx"))
    }


def test_the_default_is_the_papers_list(tmp_path):
    assert SelectiveOp().saved == PAPER
    tiny.recipe(tmp_path, ac=SelectiveOp())

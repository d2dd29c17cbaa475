"""What a policy of another package gets without writing it."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs import Activation, Operation, Share
from titanlab.techniques.ac.contract import ACConfig, needed_again
from titanlab.techniques.ac.recomputation import WholeBlocks

X = Activation(name="x", shape=(2, 8))
Y = Activation(name="y", shape=(2, 4), cut="part")
SHARE = Share(element_bytes=2)


def operation(name, *keeps):
    return Operation(name=name, kind="pointwise", flops=0, output=(2, 8), keeps=keeps)


BLOCK = [operation("norm", X), operation("product", X, Y), operation("sum")]


@dataclass(frozen=True, kw_only=True)
class Odd(ACConfig):
    """Blocks with an odd number are recomputed."""

    kind: str = "odd"

    def recomputes(self, number):
        return bool(number % 2)


@dataclass(frozen=True, kw_only=True)
class Bare(ACConfig):
    """A policy that defines nothing."""

    kind: str = "bare"


def test_by_default_no_block_is_recomputed():
    bare = Bare()
    assert not bare.recomputes(0)
    assert bare.saved_bytes(BLOCK, SHARE, number=0) == 2 * (16 + 8)
    assert bare.recomputed(BLOCK, number=0) == ()
    assert not bare.repeats_collective("_c10d_functional.reduce_scatter_tensor.default", number=0)
    assert (bare.compiler_budget(), bare.describe(), bare.check(None)) == (None, "bare", None)
    assert bare.reduced(note=print) is bare
    assert isinstance(bare.implementation(), WholeBlocks)


def test_a_block_that_is_recomputed_keeps_its_input():
    odd = Odd()
    assert [odd.saved_bytes(BLOCK, SHARE, number=number) for number in (0, 1)] == [2 * (16 + 8), 2 * 16]
    assert [odd.recomputed(BLOCK, number=number) for number in (0, 1)] == [(), ("norm",)]
    assert [odd.repeats_collective("any", number=number) for number in (0, 1)] == [False, True]
    assert [odd.treatment(number) for number in (0, 1, 2)] == [False, True, False]


def test_recomputation_stops_at_the_last_operation_that_keeps_something():
    assert needed_again(BLOCK) == ("norm",)
    assert needed_again(BLOCK[:1]) == needed_again(BLOCK[2:]) == needed_again([]) == ()
    assert needed_again([*BLOCK, operation("last", Y), operation("after")]) == ("norm", "product", "sum")

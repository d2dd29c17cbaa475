"""ac=selective_op: which results are kept, in the account and by the policy that torch asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from titanlab.techniques.ac.recomputation import SelectedOperators, _Policy
from titanlab.techniques.ac.recomputation_schema import SAME

MM, SILU, MAX = "aten.mm.default", "aten.silu.default", "aten.max.dim"
KEPT, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def asked(policy, *operators, again=False):
    return [policy(SimpleNamespace(is_recompute=again), operator) for operator in operators]


def test_the_policy_keeps_every_other_product():
    policy = _Policy((MM, SILU), every_other=True)
    mm, silu, mul = torch.ops.aten.mm.default, torch.ops.aten.silu.default, torch.ops.aten.mul.Tensor
    assert asked(policy, mm, silu, mm, mul, mm) == [KEPT, KEPT, AGAIN, AGAIN, KEPT]
    # The recomputation counts for itself, so that it finds the same.
    assert asked(policy, mm, silu, mm, mul, mm, again=True) == [KEPT, KEPT, AGAIN, AGAIN, KEPT]


def test_the_policy_keeps_all_products_if_it_is_told_so():
    policy = _Policy((MM,), every_other=False)
    assert asked(policy, *[torch.ops.aten.mm.default] * 3) == [KEPT] * 3


@pytest.mark.parametrize(("printed", "like"), SAME.items())
def test_an_operator_that_takes_anothers_place_is_kept_as_that_is(printed, like):
    assert asked(_Policy((like,), every_other=False), printed) == [KEPT]
    assert asked(_Policy((printed,), every_other=False), printed) == [AGAIN]


def test_operators_are_known_as_torch_prints_them():
    known = SelectedOperators.known_operators()
    assert {str(torch.ops.aten.mm.default), str(torch.ops.aten.max.dim)} == {MM, MAX} & known
    assert not any("::" in name for name in known)

"""The operators have the names under which torch knows them."""

import importlib

import pytest
import torch

from titanlab.costs import CONTEXT_ATTENTION, EXCHANGE, GROUPED_PRODUCT


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (CONTEXT_ATTENTION, "titanlab.parallelism.context"),
        (GROUPED_PRODUCT, "titanlab.techniques.model.mixture_of_experts"),
        (EXCHANGE, "titanlab.parallelism.expert"),
    ],
)
def test_torch_has_an_operator_of_this_name(name, module):
    importlib.import_module(module)
    namespace, operator, overload = name.split(".")
    assert str(getattr(getattr(getattr(torch.ops, namespace), operator), overload)) == name

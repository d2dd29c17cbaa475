"""What an account says of a model: its parameters and FLOPs, its linear layers, and names that are those of torch."""

import dataclasses
import importlib

import pytest
import torch

from titanlab.costs import (
    CONTEXT_ATTENTION,
    EXCHANGE,
    GROUPED_PRODUCT,
    ModelAccount,
    linear_layers,
    path_matches,
    training_flops_per_token,
)
from titanlab.techniques.model.llama_schema import Llama


def account(*, tied):
    parameters = {"table": (10, 4), "layer": (4, 4), "norm": (4,)}
    sizes = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 2, "dim": 4, "vocab_size": 10}
    if not tied:
        parameters["head"] = (10, 4)
    return ModelAccount(parameters=parameters, embedding="table", tied={"head": "table"} if tied else {}, **sizes)


def test_a_table_is_left_out_unless_it_is_the_head():
    tied, untied = account(tied=True), account(tied=False)
    assert (untied.parameter_count, untied.embedding_count) == (100, 40)
    assert (tied.parameter_count, tied.embedding_count) == (60, 0)
    # Layer 16, norm 4, head 40: six times 60. Attention: 12 · 1 layer · 2 heads · 2 wide · 5 positions.
    assert training_flops_per_token(untied, seq_len=5) == 6 * 60 + 12 * 1 * 2 * 2 * 5
    assert training_flops_per_token(tied, seq_len=5) == training_flops_per_token(untied, seq_len=5)


MODEL = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=200, vocab_size=256).account()


def test_layers_that_multiply_are_found_with_and_without_a_tensor_plan():
    layers = linear_layers(MODEL)
    assert len(layers) == 2 * 7 + 1
    assert layers["layers.0.attention.wk"] == (32, 64)
    assert not {MODEL.embedding.removesuffix(".weight"), "norm"} & set(layers)
    assert linear_layers(dataclasses.replace(MODEL, tensor_plan={})) == layers


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("wk", True),
        ("attention.w*", True),
        ("layers.0", True),
        ("layers.0.attention.wk", True),
        ("k", False),
        ("layers.1", False),
        ("attention.wq", False),
    ],
)
def test_a_pattern_matches_steps_of_a_path(pattern, is_match):
    assert path_matches("layers.0.attention.wk", pattern) is is_match


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

"""Differences between a model and its account are found, each in a line; a model without any has none."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from titanlab.costs import Init
from titanlab.parallelism import STYLES
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train.conformance import faults

SIZES = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 48, "vocab_size": 40}
NORM, WQ = "norm.weight", "layers.0.attention.wq.weight"


@dataclass(frozen=True, kw_only=True)
class Wrong(Llama):
    """A Llama some of whose answers are replaced: `edit`, by method, changes what it says."""

    edit: Any = None

    def account(self):
        return self.edited("account", super().account())

    def initial_values(self):
        return self.edited("initial_values", super().initial_values())

    def block_operations(self, **sizes):
        return self.edited("block_operations", super().block_operations(**sizes))

    def edge_operations(self, **sizes):
        return self.edited("edge_operations", super().edge_operations(**sizes))

    def edited(self, name, value):
        return self.edit[name](value) if name in (self.edit or {}) else value


def found(**edit):
    return faults(Wrong(**SIZES, edit=edit), batch=1, seq_len=6)


def account(**changes):
    """The faults of an account with some fields replaced, or changed by a function."""

    def edit(right):
        return replace(right, **{k: v(getattr(right, k)) if callable(v) else v for k, v in changes.items()})

    return found(account=edit)


def without(*names):
    return lambda values: {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize("change", [{}, {"tied_embeddings": True}, {"kv_heads": 2}, {"layers": 3}])
def test_a_model_that_agrees_has_no_faults(change):
    assert faults(Llama(**{**SIZES, **change})) == []
    assert faults(Llama(**{**SIZES, **change}), batch=1, seq_len=9) == []


def test_a_parameter_of_another_shape_or_name_is_found():
    lines = account(parameters=lambda right: {**right, WQ: (32, 33)})
    assert lines[0] == f"parameters: {WQ} is (32, 32) in the module, (32, 33) in the account"
    lines = account(parameters=without(NORM))
    assert f"parameters: {NORM} is (32,) in the module, None in the account" in lines
    lines = account(parameters=lambda right: {**right, "extra": (1,)})
    assert "parameters: extra is None in the module, (1,) in the account" in lines


def test_initial_values_of_more_or_fewer_parameters_are_found():
    assert found(initial_values=without(NORM)) == [
        f"initial_values: {NORM} is in only one of initial_values and module"
    ]
    more = {"x": Init(kind="ones")}
    assert found(initial_values=lambda right: {**right, **more}) == [
        "initial_values: x is in only one of initial_values and module"
    ]


def test_pieces_that_are_not_the_modules_are_found():
    assert "pieces: there is no module head" in account(pieces=lambda right: (*right[:-1], "head"))
    assert account(pieces=lambda right: (right[0], *reversed(right[1:-2]), *right[-2:]))[0] == (
        "pieces: blocks are missing, or not in order"
    )
    assert account(pieces=lambda right: tuple(each for each in right if each != "norm")) == [
        f"pieces: none of them has {NORM}"
    ]


def test_another_order_of_pieces_computes_something_else_or_fails():
    lines = account(pieces=lambda right: (*right[:-2], "output", "norm"))
    assert lines
    assert all(line.startswith(("pieces: cut before", "pieces: before")) for line in lines)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"parameters": lambda right: dict(reversed(right.items()))},
            "parameters: the account has them in another order than the module",
        ),
        ({"embedding": "table.weight"}, "account: table.weight is named, but the model has no such parameter"),
        ({"lookups": ("positions.weight",)}, "account: positions.weight is named, but the model has no such parameter"),
        ({"tied": {"output.weight": "tok_embeddings.weight"}}, "tied: output.weight has storage of its own"),
        ({"layers": 3}, "layers: the module has ['0', '1'], the account 3"),
        (
            {"tensor_plan": lambda right: {**right, "norm": "whole"}},
            f"tensor_plan: norm has the style whole; known: {', '.join(STYLES)}",
        ),
        ({"attention": "attention.core"}, "attention: there is no module layers.0.attention.core"),
        ({"tensor_plan": without("norm")}, f"tensor_plan: nothing is said about {NORM}"),
        ({"tensor_plan": lambda right: {**right, "nowhere": "norm"}}, "tensor_plan: there is no module nowhere"),
        ({"tensor_plan": lambda right: {**right, "norm": "gathered"}}, f"tensor_plan: nothing is said about {NORM}"),
        # One step of a path is one step.
        (
            {"tensor_plan": lambda right: {**right, "layers.*": "norm", "*.wq": "norm"}},
            "tensor_plan: there is no module *.wq",
        ),
    ],
)
def test_names_and_paths_that_are_not_there_are_found(changes, line):
    assert line in account(**changes)


def test_a_model_without_a_plan_or_pieces_is_accepted():
    assert account(tensor_plan={}) == account(pieces=()) == []


def changed(operation, **changes):
    def edit(operations):
        return [replace(each, **changes) if each.name == operation else each for each in operations]

    return edit


def test_wrong_flops_and_shapes_of_an_operation_are_found():
    lines = found(block_operations=changed("attention.wq", flops=7, output=(1, 6, 31)))
    assert lines[:2] == [
        "operations: layers.0.attention.wq gives (1, 6, 32), not (1, 6, 31)",
        "operations: layers.0.attention.wq takes 12288 FLOPs, not 7",
    ]
    assert lines[-2].startswith("operations: a forward pass takes ")
    assert lines[-1].startswith("FLOPs: the sizes in the account make ")


def test_an_operation_that_is_there_twice_is_found():
    lines = found(block_operations=lambda right: [*right, right[0]])
    assert lines == ["operations: attention_norm is there 2 times"]


def test_an_edge_that_is_no_piece_is_found():
    assert found(edge_operations=changed("norm", name="scale")) == [
        "operations: scale is outside of the blocks, but not one of the pieces"
    ]


def test_sizes_that_make_other_flops_than_the_operations_are_found():
    (line,) = account(heads=3)
    told = re.fullmatch(
        r"FLOPs: the sizes in the account make (\d+) a token, its operations (\d+); is a table missing in lookups\?",
        line,
    )
    # Attention of 16 dims more over 6 tokens, of both blocks.
    assert int(told[1]) - int(told[2]) == 12 * 2 * 16 * 6

"""The order of what a compiled forward saves: torch's function is wrapped once, and gets the place behind objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._functorch import partitioners

from titanlab.techniques.compile.compiler import put_states_before_objects


class Node:
    """A node of a graph, in the order of a list that it can be moved in."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def prepend(self, other):
        self.order.remove(other)
        self.order.insert(self.order.index(self), other)


class Graph:
    def __init__(self, *names):
        self.nodes = []
        self.nodes += [Node(name, self.nodes) for name in names]
        self.recompiled = 0
        self.graph = self

    def output_node(self):
        return SimpleNamespace(all_input_nodes=self.nodes)

    def find_nodes(self, *, op):
        assert op == "placeholder"
        return iter(list(self.nodes))

    def recompile(self):
        self.recompiled += 1

    @property
    def names(self):
        return [node.name for node in self.nodes]


@pytest.fixture
def original(monkeypatch):
    """torch's function, which notes its last argument."""
    calls = []

    def functionalize_rng_ops(joint, forward, backward, sizes):
        calls.append(sizes)
        return forward, backward

    monkeypatch.setattr(partitioners, "functionalize_rng_ops", functionalize_rng_ops)
    monkeypatch.setattr(partitioners, "is_opaque_node", lambda node: node.name.startswith("mesh"), raising=False)
    return calls


def test_states_stand_before_objects_in_both_graphs(original):
    put_states_before_objects()
    forward = Graph("a", "mesh_0", "mesh_1", "size")
    backward = Graph("a", "mesh_0", "mesh_1", "rng_state_output_0", "rng_state_output_1", "tangent")
    assert partitioners.functionalize_rng_ops(None, forward, backward, 1) == (forward, backward)
    # Behind the place for states there are one size and two objects.
    assert original == [3]
    assert backward.names == ["a", "rng_state_output_0", "rng_state_output_1", "mesh_0", "mesh_1", "tangent"]
    assert backward.recompiled == 1


def test_graphs_without_objects_stay_as_torch_makes_them(original):
    put_states_before_objects()
    backward = Graph("a", "rng_state_output_0", "tangent")
    partitioners.functionalize_rng_ops(None, Graph("a", "size"), backward, 1)
    assert original == [1]
    assert (backward.names, backward.recompiled) == (["a", "rng_state_output_0", "tangent"], 0)


def test_it_is_done_once(original):
    put_states_before_objects()
    patched = partitioners.functionalize_rng_ops
    put_states_before_objects()
    assert partitioners.functionalize_rng_ops is patched


def test_a_torch_without_such_objects_is_left_alone(original, monkeypatch):
    monkeypatch.delattr(partitioners, "is_opaque_node")
    before = partitioners.functionalize_rng_ops
    put_states_before_objects()
    assert partitioners.functionalize_rng_ops is before


def test_torch_still_has_what_is_patched():
    """The argument that is changed is the fourth, by its name."""
    import inspect

    function = inspect.unwrap(partitioners.functionalize_rng_ops)
    assert list(inspect.signature(function).parameters)[3] == "num_sym_nodes"

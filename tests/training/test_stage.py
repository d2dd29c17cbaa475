"""Building a stage: which pieces it keeps, under which names, and what is on when it is built."""

import os

import pytest
import torch
from torch import nn

from tests import tiny
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.techniques.model.language_model import LanguageModel
from titanlab.train.stage import build_stage, default_dtype, thin, together

PIECES = ("table", "layers.0", "layers.1", "head")


class Model(LanguageModel):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.layers = nn.ModuleDict({str(index): nn.Linear(2, 2) for index in range(2)})
        self.head = nn.Linear(2, 4)


def test_a_stage_keeps_its_pieces_and_their_names():
    whole = dict(Model().named_parameters())
    first, last = Model(), Model()
    thin(first, PIECES, ("table", "layers.0"))
    thin(last, PIECES, ("layers.1", "head"))
    assert last.table is None
    assert list(last.layers) == ["1"]
    names = [*dict(first.named_parameters()), *dict(last.named_parameters())]
    assert sorted(names) == sorted(whole)
    joined = together({"table": first, "layers.0": first, "layers.1": last, "head": last})
    assert sorted(dict(joined.named_parameters())) == sorted(whole)
    assert joined.get_submodule("layers.1") is last.layers["1"]


def test_the_default_dtype_returns_also_after_an_error():
    with pytest.raises(ValueError, match="inside"), default_dtype(torch.bfloat16):
        assert torch.get_default_dtype() is torch.bfloat16
        raise ValueError("inside")
    assert torch.get_default_dtype() is torch.float32


def built(made, pieces):
    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        stage = build_stage(made, world, build_mesh(made.layout, "cpu"), pieces=pieces)
        values = {name: p.detach().clone() for name, p in stage.model.named_parameters()}
        return values, stage.sharded.divides_by, len(stage.summands)


def test_a_stage_has_the_values_of_the_whole_model(pool, tmp_path):
    made = tiny.recipe(tmp_path)
    [(whole, divides_by, summands)] = pool.run(1, built, made, None)
    [(stage, _, _)] = pool.run(1, built, made, ["layers.1", "norm"])
    assert (divides_by, summands) == (1, 0)
    assert {name.rpartition(".")[0].split(".")[0] for name in stage} == {"layers", "norm"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in stage.items())

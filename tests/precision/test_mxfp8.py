"""Layers that multiply in mxfp8: which are replaced, what is kept of them, and what a wrong torchao says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlab.errors import ConfigError
from titanlab.techniques.precision import float8 as mxfp8
from titanlab.techniques.precision.float8 import Mxfp8Layers, Mxfp8Linear
from titanlab.techniques.precision.float8_schema import Mxfp8

CPU = torch.device("cpu")


@pytest.fixture
def plain(monkeypatch):
    """A product in full precision, in place of torchao's; notes whether it would be emulated."""
    emulated = []

    def multiplier(*, emulate):
        emulated.append(emulate)
        return lambda inputs, weight: inputs @ weight.T

    monkeypatch.setattr(mxfp8, "_multiplier", multiplier)
    return emulated


def model(**layers):
    return nn.ModuleDict({"block": nn.ModuleDict(layers)})


def test_layers_are_replaced_and_keep_their_parameters(plain):
    layer = nn.Linear(64, 32)
    made = model(wq=layer)
    before = dict(made.named_parameters())
    Mxfp8Layers(Mxfp8()).convert(made, CPU)
    replaced = made["block"]["wq"]
    assert type(replaced) is Mxfp8Linear
    assert {name: id(value) for name, value in made.named_parameters()} == {
        name: id(value) for name, value in before.items()
    }
    inputs = torch.randn(2, 3, 64)
    assert torch.allclose(replaced(inputs), layer(inputs), atol=1e-5)
    # A CPU cannot multiply in it.
    assert plain == [True]


def test_a_layer_without_a_bias_has_none(plain):
    made = model(wq=nn.Linear(64, 32, bias=False))
    Mxfp8Layers(Mxfp8()).convert(made, CPU)
    assert made["block"]["wq"].bias is None
    assert made["block"]["wq"](torch.zeros(1, 64)).shape == (1, 32)


def test_on_the_meta_device_nothing_is_allocated(plain):
    with torch.device("meta"):
        made = model(wq=nn.Linear(64, 32))
    Mxfp8Layers(Mxfp8()).convert(made, CPU)
    assert made["block"]["wq"].weight.is_meta


@pytest.mark.parametrize("change", [{"skip": ["wq"]}, {"skip": ["block"]}])
def test_layers_that_the_recipe_excludes_stay(plain, change):
    made = model(wq=nn.Linear(64, 32))
    Mxfp8Layers(Mxfp8(**change)).convert(made, CPU)
    assert type(made["block"]["wq"]) is nn.Linear


def test_layers_that_do_not_consist_of_blocks_stay(plain):
    made = model(wq=nn.Linear(64, 33), wk=nn.Linear(63, 32), norm=nn.LayerNorm(64))
    Mxfp8Layers(Mxfp8()).convert(made, CPU)
    assert [type(layer) for layer in made["block"].values()] == [nn.Linear, nn.Linear, nn.LayerNorm]


def test_a_device_that_can_neither_multiply_nor_emulate_is_one_line():
    with pytest.raises(ConfigError, match=r"^precision.emulate=false: a CPU has no .* products; try auto$"):
        Mxfp8Layers(Mxfp8(emulate="false")).convert(model(wq=nn.Linear(64, 32)), CPU)


@pytest.mark.parametrize("error", [ImportError("No module\nnamed x"), AttributeError("no mx_mm")])
def test_a_torchao_without_the_prototype_is_one_line(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setattr(mxfp8, "import_quietly", missing)
    with pytest.raises(ConfigError) as caught:
        Mxfp8Layers(Mxfp8()).convert(model(wq=nn.Linear(64, 32)), CPU)
    said = str(caught.value)
    assert said.startswith("precision=mxfp8: this torchao lacks the prototype (")
    assert "\n" not in said
    assert said.endswith("; pip install torchao>=0.18, or try precision=bf16")


def test_a_torchao_with_another_product_is_one_line(monkeypatch):
    """A prototype changes its names from version to version."""
    whole = mxfp8.import_quietly

    class Without:
        pass

    monkeypatch.setattr(mxfp8, "import_quietly", lambda name: Without() if name == mxfp8._PROTOTYPE else whole(name))
    with pytest.raises(ConfigError, match="^precision=mxfp8: this torchao lacks the prototype"):
        mxfp8._multiplier(emulate=True)

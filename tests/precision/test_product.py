"""Which modules other code may compute, and which it refuses in one line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.refusals import refusal
from titanlab.costs import Joined
from titanlab.errors import ConfigError
from titanlab.parallelism import join_products
from titanlab.parallelism.pipeline_weights import DeferredWeights
from titanlab.techniques.model.language_model import Projections
from titanlab.techniques.model.llama import TiedOutput
from titanlab.techniques.precision.product import PLAIN, Product, departure, product_of, take_over

TAKEN = {"key": "parallelism.tensor", "value": 2, "cure": "try 1"}


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Named(Doubled):
    product = Product(lambda inputs, weight, bias: 2 * F.linear(inputs, weight, bias))

    def forward(self, inputs):
        return self.product.forward(inputs, self.weight, self.bias)


class Derived(Named):
    def forward(self, inputs):
        return 3 * super().forward(inputs)


class Renamed(nn.Linear):
    pass


class Called(nn.Linear):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Int8(torch.Tensor):
    pass


class Scaled(nn.Embedding):
    def forward(self, inputs):
        return 8 * super().forward(inputs)


class Softcapped(TiedOutput):
    def forward(self, hidden, weight):
        return super().forward(hidden, weight).tanh()


def changed(change):
    layer = nn.Linear(4, 4)
    change(layer)
    return layer


REFUSED = {
    "subclass": (Doubled(4, 4), "has another forward (Doubled)"),
    "derived from one with a product": (Derived(4, 4), "has another forward (Derived)"),
    "call": (Called(4, 4), "has another forward (Called)"),
    "attribute": (changed(lambda layer: setattr(layer, "forward", lambda inputs: inputs)), "has another forward (Linear)"),
    "swapped": (nn.Sequential(nn.Linear(4, 4)), "has another forward (Sequential)"),
    "parametrization": (changed(lambda layer: parametrize.register_parametrization(layer, "weight", nn.Tanh())), "is parametrized"),
    "weight norm": (weight_norm(nn.Linear(4, 4)), "is parametrized"),
    "forward hook": (changed(lambda layer: layer.register_forward_hook(lambda _, __, output: 2 * output)), "has hooks"),
    "pre-hook": (changed(lambda layer: layer.register_forward_pre_hook(lambda _, inputs: inputs)), "has hooks"),
    "backward hook": (changed(lambda layer: layer.register_full_backward_hook(lambda *_: None)), "has hooks"),
    "hook beside a product": (Named(4, 4), "has hooks"),
    "tensor subclass": (changed(lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4).as_subclass(Int8)))), "has another kind of weight (Int8)"),
    "head that is handed a table": (Softcapped(), "has another forward (Softcapped)"),
}  # fmt: skip
REFUSED["hook beside a product"][0].register_forward_hook(lambda _, __, output: output)


@pytest.mark.parametrize("name", REFUSED)
def test_what_replaces_a_layer_is_refused(name):
    layer, how = REFUSED[name]
    assert refusal(take_over, layer, "layers.0.wq", **TAKEN).startswith(
        f"parallelism.tensor=2: computes layers.0.wq as Linear does, and layers.0.wq {how}; try 1"
    )


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), Renamed(4, 4), Named(4, 4), TiedOutput()])
def test_what_computes_its_product_is_taken(layer):
    assert take_over(layer, "wq", **TAKEN) is getattr(layer, "product", PLAIN)
    layer.forward = None
    # Others may take it over too.
    assert take_over(layer, "wq", **TAKEN) is product_of(layer)


def test_other_modules_compute_as_their_class():
    take_over(nn.Embedding(4, 4), "table", like=nn.Embedding, **TAKEN)
    with pytest.raises(ConfigError, match=r"as Embedding does, and table has another forward \(Scaled\); try 1$"):
        take_over(Scaled(4, 4), "table", like=nn.Embedding, **TAKEN)
    norm = nn.RMSNorm(4)
    take_over(norm, "norm", like=nn.RMSNorm, **TAKEN)
    norm.forward = lambda inputs: inputs
    with pytest.raises(ConfigError, match="norm has another forward"):
        take_over(norm, "norm", like=nn.RMSNorm, **TAKEN)


@pytest.mark.parametrize("name", [name for name, (layer, _) in REFUSED.items() if isinstance(layer, nn.Linear)])
def test_a_layer_without_a_product_keeps_its_forward_in_a_pipeline(name):
    layer, how = REFUSED[name]
    before = vars(layer).get("forward")
    DeferredWeights(nn.Sequential(layer))
    assert vars(layer).get("forward") is before or how == "has hooks"
    vars(layer).pop("deferred_weights")


class Owner(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.a, self.b = layers
        self.projections = Projections()


def test_layers_are_joined_only_if_they_multiply_alike():
    joined = [Joined(caller="projections", layers=("a", "b"))]
    halves = Product(PLAIN.forward, PLAIN.of_inputs, PLAIN.of_weight)
    other = nn.Linear(4, 4, bias=False)
    other.product = halves
    for layers in ((nn.Linear(4, 4, bias=False), other), (Named(4, 4, bias=False), Named(4, 4, bias=False))):
        with pytest.raises(
            ConfigError,
            match=r"model.fused=true: multiplies a, b of .* as one product, which they do not share; try false",
        ):
            join_products(Owner(*layers), joined, None)
    with pytest.raises(
        ConfigError, match=r"model.fused=true: computes .*a as Linear does, and .*a has another forward"
    ):
        join_products(Owner(Doubled(4, 4, bias=False), other), joined, None)
    assert departure(other) == ""

"""Gradients of weights that come later are the same: eager or compiled, in float8, cut over ranks, checkpointed."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallelism.pipeline_run import SEQ
from titanlab.options import schema_of
from titanlab.parallelism.pipeline_weights import DeferredWeights
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveOp
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model import llama
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.product import product_of

CONFIG = Llama(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
PRODUCTS = 7
POLICIES = {"none": NoCheckpointing(), "full": FullCheckpointing(), "selective_op": SelectiveOp()}


class Products(TorchDispatchMode):
    """Counts products of matrices that run in eager mode or as aot_eager compiles it."""

    # What repeats chance, in checkpointed blocks, is one.
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return operator(*args, **(kwargs or {}))


def counted(function):
    with Products() as products:
        function()
    return products.count


@pytest.mark.parametrize(
    "policy", ["selective_op", *(pytest.param(policy, marks=pytest.mark.full) for policy in ("none", "full"))]
)
def test_a_compiled_block_leaves_the_products_of_its_weights_for_later(policy):
    torch.manual_seed(0)
    model = llama.LlamaModel(CONFIG, seq_len=SEQ)
    whole = copy.deepcopy(model)
    for each in (model, whole):
        POLICIES[policy].implementation().apply(dict(enumerate(each.layers.values())))
        Compile(blocks=True, backend="aot_eager").implementation().compile_blocks(each.layers.values())
    deferred = DeferredWeights(model)
    tokens = torch.randint(0, CONFIG.vocab_size, (3, 2, SEQ))
    expected = []
    for each in tokens:
        loss = whole(each).square().mean()
        expected.append(counted(loss.backward))
    weights = PRODUCTS * CONFIG.layers + 1
    losses = [model(each).square().mean() for each in tokens]
    for microbatch, loss in enumerate(losses[:2]):
        with deferred.collect(microbatch):
            assert counted(loss.backward) == expected[microbatch] - weights
    late = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert len(late) == weights
    assert not [name for name in late if "norm" in name or "embed" in name]
    for microbatch in (1, 0):
        assert counted(lambda: deferred.compute(microbatch)) == weights  # noqa: B023
    # Outside of `collect` a backward is whole.
    assert counted(losses[2].backward) == expected[2]
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


class Twice(nn.Module):
    """A block that calls a layer twice, of whose two products the factors come together."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden):
        return self.layer(self.layer(hidden).tanh())


def test_a_layer_that_is_called_twice_computes_at_once():
    torch.manual_seed(0)
    block, twin = Twice(), Twice()
    twin.load_state_dict(block.state_dict())
    Compile(blocks=True, backend="aot_eager").implementation().compile_blocks([block])
    deferred = DeferredWeights(nn.Sequential(block))
    hidden = torch.randn(2, 3, 4)
    with deferred.collect(0):
        block(hidden).sum().backward()
    deferred.compute(0)
    twin(hidden).sum().backward()
    for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


RECIPES = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp")


def float8_layer(kind, **given):
    config = schema_of("precision", kind)(skip=[], **given)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48, bias=False))
    config.implementation().convert(model, torch.device("cpu"))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    nn.init.normal_(model[0].weight)
    return model


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "") for kind in RECIPES),
        ("float8_tensorwise", "aot_eager"),
        *(pytest.param(kind, "aot_eager", marks=pytest.mark.full) for kind in RECIPES[1:]),
    ],
)
def test_float8_computes_both_halves_as_torchao_does(kind, backend):
    """To the last bit; compiled code is held to compiled code."""
    given = {"all_gather": False} if kind == "float8_tensorwise" else {}
    whole, model = float8_layer(kind, **given), float8_layer(kind, **given)
    if backend:
        for each in (whole, model):
            Compile(blocks=True, backend=backend).implementation().compile_blocks([each])
    deferred = DeferredWeights(model)
    assert product_of(model[0]).of_weight
    inputs = [torch.randn(2, 16, 32, requires_grad=True) for _ in range(2)]
    twins = [each.detach().clone().requires_grad_() for each in inputs]
    slope = torch.randn(2, 16, 48)
    for microbatch, (each, twin) in enumerate(zip(inputs, twins, strict=True)):
        output, expected = model(each), whole(twin)
        assert torch.equal(output, expected)
        expected.backward(slope)
        with deferred.collect(microbatch):
            output.backward(slope)
        assert torch.equal(each.grad, twin.grad)
    assert model[0].weight.grad is None
    for microbatch in range(2):
        deferred.compute(microbatch)
    assert torch.equal(model[0].weight.grad, whole[0].weight.grad)


def test_biases_and_other_layers_are_computed_at_once():
    torch.manual_seed(0)
    stage, twin = (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)) for _ in range(2))
    twin.load_state_dict(stage.state_dict())
    deferred = DeferredWeights(stage)
    inputs = torch.randn(3, 5, 4)
    twin(inputs).square().sum().backward()
    with deferred.collect(0):
        stage(inputs).square().sum().backward()
    late = [name for name, parameter in stage.named_parameters() if parameter.grad is None]
    assert late == ["0.weight", "2.weight"]
    deferred.compute(0)
    for ours, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    # Outside of `collect` a backward is whole.
    stage(inputs).square().sum().backward()
    for ours, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * theirs.grad)

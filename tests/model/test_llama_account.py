"""Llama's account says what the module is and does."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.model.published import FLOPS_PER_TOKEN, NAMES, PARAMETERS, load
from titanlab.costs import forward_flops, training_flops_per_token
from titanlab.techniques.model import llama_account
from titanlab.techniques.model.llama import LlamaModel
from titanlab.techniques.model.llama_account import block_operations

BATCH, SEQ = 2, 16
SMALL = {
    "debug": {},
    "tied": {"tied_embeddings": True},
    "unshared": {"kv_heads": 4},
    "head norms": {"name": "qwen3_debug"},
    "odd": {"dim": 60, "heads": 6, "kv_heads": 3, "ffn_dim": 77, "vocab_size": 101, "layers": 3},
}


def on_meta(config):
    with torch.device("meta"):
        return LlamaModel(config, seq_len=SEQ)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_modules(name):
    config = load(name)
    account = llama_account.account(config)
    module = on_meta(config)
    assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == list(account.parameters.items())
    # What is saved: no buffers, and a tied table once.
    assert list(module.state_dict()) == list(account.parameters)
    assert account.parameter_count == sum(p.numel() for p in module.parameters())
    assert dict(account.tied) == ({"output.weight": "tok_embeddings.weight"} if config.tied_embeddings else {})
    assert (account.layers, account.dim, account.vocab_size) == (config.layers, config.dim, config.vocab_size)
    assert account.heads * account.head_dim == config.attention_dim
    assert account.kv_heads == config.kv_heads


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    assert llama_account.account(load(name)).parameter_count == PARAMETERS[name]


@pytest.mark.parametrize(("name", "seq_len"), FLOPS_PER_TOKEN)
def test_published_flops(name, seq_len):
    assert (
        training_flops_per_token(llama_account.account(load(name)), seq_len=seq_len) == FLOPS_PER_TOKEN[name, seq_len]
    )


class Trace(TorchFunctionMode):
    """What runs where: (path of the module, function, output shape) of every torch function."""

    def __init__(self, module):
        super().__init__()
        self.seen = []
        self._path = [""]
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, name=name: self._path.append(name))
            part.register_forward_hook(lambda *_: self._path.pop() and None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            # A residual is added to the stream, that is, to the first argument.
            self.seen.append((self._path[-1], function.__name__, tuple(output.shape)))
        return output


def traced_operations(config):
    """The forward pass as the account would put it: names in the whole model, output shapes."""
    module = on_meta(config)
    with Trace(module) as trace:
        module(torch.zeros(BATCH, SEQ, dtype=torch.int64, device="meta"))
    sums = iter(["attention_residual", "ffn_residual"] * config.layers)
    turned = iter(["rope_q", "rope_k"] * config.layers)
    operations = []
    for path, function, shape in trace.seen:
        if function in ("linear", "rms_norm", "embedding", "scaled_dot_product_attention"):
            operations.append((path, shape))
        elif function == "type_as":  # the end of a rotation
            operations.append((f"{path}.{next(turned)}", shape))
        elif function in ("silu", "mul") and path.endswith("feed_forward"):
            operations.append((f"{path}.{function}", shape))
        elif function == "add":
            operations.append((f"{path}.{next(sums)}", shape))
    return operations


@pytest.mark.parametrize("change", SMALL.values(), ids=SMALL)
def test_operations_are_the_modules(change):
    config = load(**{"name": "debug", **change})
    block = block_operations(config, batch=BATCH, seq_len=SEQ)
    first, *last = llama_account.edge_operations(config, batch=BATCH, seq_len=SEQ)
    declared = [(first.name, first.output)]
    for layer in range(config.layers):
        declared += [(f"layers.{layer}.{operation.name}", operation.output) for operation in block]
    declared += [(operation.name, operation.output) for operation in last]
    assert traced_operations(config) == declared


@pytest.mark.parametrize("change", SMALL.values(), ids=SMALL)
def test_flops_are_those_that_torch_counts(change):
    config = load(**{"name": "debug", **change})
    module = on_meta(config)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(BATCH, SEQ, dtype=torch.int64, device="meta"))
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    block = block_operations(config, batch=BATCH, seq_len=SEQ)
    edges = llama_account.edge_operations(config, batch=BATCH, seq_len=SEQ)
    for layer in range(config.layers):
        for operation in block:
            assert counts.get(f"LlamaModel.layers.{layer}.{operation.name}", 0) == operation.flops, operation.name
    for operation in edges:
        assert counts.get(f"LlamaModel.{operation.name}", 0) == operation.flops, operation.name
    assert counter.get_total_flops() == config.layers * forward_flops(block) + forward_flops(edges)


@pytest.mark.parametrize("name", ["debug", "llama3_8b", "llama3_2_1b"])
def test_flops_per_token_are_three_forward_passes(name):
    """But for the norms' weights, which the convention counts and which multiply nothing."""
    config = load(name)
    account = llama_account.account(config)
    block = block_operations(config, batch=3, seq_len=32)
    forward = config.layers * forward_flops(block) + forward_flops(
        llama_account.edge_operations(config, batch=3, seq_len=32)
    )
    norms = sum(math.prod(shape) for name, shape in account.parameters.items() if "norm" in name)
    assert training_flops_per_token(account, seq_len=32) == 3 * forward // (3 * 32) + 6 * norms


def test_initial_values_cover_the_parameters():
    for change in SMALL.values():
        config = load(**{"name": "debug", **change})
        assert llama_account.initial_values(config).keys() == llama_account.account(config).parameters.keys()


def test_initial_values_follow_depth_and_width():
    values = llama_account.initial_values(load("llama3_8b"))
    assert values["norm.weight"].kind == values["layers.31.ffn_norm.weight"].kind == "ones"
    assert values["tok_embeddings.weight"].std == values["layers.0.feed_forward.w3.weight"].std == 0.02
    assert values["layers.5.attention.wo.weight"].std == pytest.approx(0.02 / 8)
    assert values["layers.5.feed_forward.w2.weight"].std == pytest.approx(0.02 / 8)
    assert values["output.weight"].std == pytest.approx(0.5 / 64)
    tied = llama_account.initial_values(load("llama3_2_1b"))
    assert tied["tok_embeddings.weight"].std == pytest.approx(0.5 / 2048**0.5)

"""Fields of optimizers, what they refuse, and the bytes of state that they declare and keep."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests import tiny
from tests.model.published import load
from tests.refusals import refusal
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.contract import Stored
from titanlab.techniques.optimizer.optimizers_schema import (
    SMALLEST,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    Muon,
    needs_torchao,
    packs,
)

LOW_BIT = (AdamW8bit, AdamW4bit, AdamWFp8)
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("schema", "change"),
    [
        (AdamW, {"lr": 0.0}),
        *((AdamW, {"betas": betas}) for betas in ([0.9], [0.9, 0.95, 0.99], [0.9, 1.0], [-0.1, 0.9], [0.9, math.nan])),
        *((AdamW, {"eps": eps}) for eps in (0.0, math.inf)),
        *((AdamW, {"weight_decay": decay}) for decay in (-0.1, math.inf, math.nan)),
        *((schema, {"rounding": "up"}) for schema in (AdamW, AdamW8bit)),
        # Two 4-bit codes are one byte.
        *((AdamW8bit, {"block_size": size}) for size in (0, -2, 129)),
        *((Muon, {"momentum": momentum}) for momentum in (1.0, -0.1, math.nan)),
        # torch raises an error at 100 steps, in the first step.
        *((Muon, {"newton_schulz_steps": steps}) for steps in (0, 100)),
        (Muon, {"adjust_lr": "half"}),
    ],
)
def test_impossible_values_are_refused(schema, change):
    with pytest.raises(ConfigError) as refused:
        schema(**change)
    assert refused.value.key == f"optimizer.{next(iter(change))}"


def given(**changed):
    return replace(setting(tiny.recipe("runs")), **changed)


# Config and setting; the key, and what the line has in it.
WRONG = [
    *((AdamW(rounding="stochastic"), {"rests_in": dtype}, "optimizer.rounding", "rest in bfloat16, and with precision=.*; try auto, or precision=bf16_full$") for dtype in ("float32", "float16")),
    (AdamW8bit(rounding="stochastic"), {"accelerator": "cuda", "device": H200}, "optimizer.rounding", "rest in bfloat16"),
    (AdamWFp8(), {"accelerator": "cuda", "device": A100}, "optimizer.kind", "compute capability 8.9"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "where", "key", "rule"), WRONG)
def test_what_cannot_work_is_refused(config, where, key, rule):
    with pytest.raises(ConfigError, match=rule) as refused:
        config.check(given(**where))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (AdamW(rounding="stochastic"), {"rests_in": "bfloat16"}),
        *((AdamW(rounding=rounding), {}) for rounding in ("auto", "nearest")),
        (AdamWFp8(), {"accelerator": "cuda", "device": "NVIDIA L4"}),
        # Of a device that is not in the table nothing is known; CPUs convert in software.
        (AdamWFp8(), {"accelerator": "cuda", "device": "NVIDIA of tomorrow"}),
        (AdamWFp8(), {"device": A100}),
        (AdamW8bit(), {"accelerator": "cuda", "device": A100}),
        (AdamW4bit(), {"accelerator": "cuda", "device": "Tesla V100-SXM2-16GB"}),
    ],
)
def test_what_may_work_is_not_refused(config, where):
    config.check(given(**where))


def test_without_torchao_what_needs_it_is_refused(monkeypatch):
    """Also where `auto` chooses stochastic rounding: otherwise every rank would end with an ImportError."""
    settings = {dtype: given(rests_in=dtype) for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for rounding in ("auto", "stochastic"):
        line = rf"^optimizer\.rounding={rounding}: needs the package torchao, .*try nearest"
        with pytest.raises(ConfigError, match=line):
            AdamW(rounding=rounding).check(settings["bfloat16"])
    AdamW(rounding="nearest").check(settings["bfloat16"])
    AdamW().check(settings["float32"])
    for schema in LOW_BIT:
        line = f"^optimizer.kind={schema().kind}: needs the package torchao, .*optimizer=adamw"
        with pytest.raises(ConfigError, match=line):
            schema().check(settings["float32"])
    told = refusal(needs_torchao, "optimizer.kind", "mine", cure="try adamw")
    rule = "optimizer.kind=mine: needs the package torchao, which is not installed"
    assert told == f"{rule}; try adamw, or install it"


def test_a_rank_keeps_whole_blocks_or_the_layout_is_refused():
    """Averages in full on the ranks and in few bits on one process: losses were 2.6e-4 apart, parameters 6.6e-3."""

    def checked(block_size, tensor):
        made = tiny.recipe("runs", model=Llama(layers=1, dim=96, heads=4, kv_heads=4, ffn_dim=192, vocab_size=256))
        layout = replace(setting(made).layout, tensor=tensor)
        AdamW4bit(block_size=block_size).check(replace(setting(made), layout=layout))

    checked(32, 1)
    checked(16, 2)
    # Rows of `wo` are kept in full in both layouts.
    checked(64, 3)
    assert refusal(checked, 32, 2) == (
        "optimizer.block_size=32: does not divide the 48 columns of layers.0.attention.wo.weight on a rank of "
        "parallelism.tensor=2; the rank would keep averages in full precision, and one process keeps them in few bits; try 16"
    )


def test_muon_refuses_experts(tmp_path):
    """A stack of matrices has three dims: AdamW would update it without a word."""
    with pytest.raises(ConfigError, match="optimizer=muon: orthogonalises single matrices"):
        tiny.recipe(tmp_path, model=load("qwen3_moe_debug", vocab_size=256), optimizer=Muon())


@pytest.mark.parametrize(
    ("shape", "cuts_of_rows", "packed"),
    [
        ((64, 256), 1, True),
        ((64, 256), 2, True),
        # A rank would have half a block of each row.
        ((64, 256), 4, False),
        ((64, 192), 1, False),
        # Too few elements, whatever their number of rows.
        ((SMALLEST // 128 - 1, 128), 1, False),
        ((SMALLEST // 128, 128), 1, True),
        ((1, SMALLEST), 1, True),
        # Of a stack of matrices the last dim is a row.
        ((4, 8, 128), 1, True),
        ((1 << 20,), 1, False),
        ((), 1, False),
    ],
)
def test_matrices_whose_rows_are_complete_blocks_have_few_bits(shape, cuts_of_rows, packed):
    assert packs(shape, block_size=128, cuts_of_rows=cuts_of_rows) is packed


# A matrix of a block, one outside, a matrix that is too small for few bits, one with uneven blocks, and a vector.
SHAPES = {
    "layers.0.wq.weight": (64, 256),
    "output.weight": (128, 512),
    "layers.0.small.weight": (8, 16),
    "layers.0.odd.weight": (96, 100),
    "norm.weight": (256,),
}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *(
            (c, dtype)
            for c in (AdamW(), AdamW(rounding="nearest"), Muon())
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *((schema(), torch.float32) for schema in LOW_BIT),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_states_have_the_bytes_that_are_declared(config, dtype):
    parameters = {name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    optimizer = config.implementation().build(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in parameters.items():
        stored = Stored(name=name, shape=SHAPES[name], part=SHAPES[name], element_bytes=dtype.itemsize)
        kept = sum(tensor.nbytes for tensor in optimizer.state[parameter].values())
        assert kept == config.state_bytes(stored) > 0, name


def test_declared_bytes_of_a_ranks_part():
    def stored(*part, name="layers.3.wq.weight", shape=(64, 512), element_bytes=4):
        return Stored(name=name, shape=shape, part=part, element_bytes=element_bytes)

    # 512 columns are four blocks of 128; on eight ranks no rank has a whole one, so that averages stay wide.
    assert AdamW4bit().state_bytes(stored(64, 256)) == 2 * (64 * 256 // 2 + 64 * 2 * 4) + 4
    assert AdamW4bit().state_bytes(stored(64, 64)) == 2 * 64 * 64 * 4 + 4
    # A rank without elements keeps the number of updates.
    assert [AdamW8bit().state_bytes(stored(*part)) for part in ((0, 512), (64, 0))] == [4, 4]
    # torch's Muon does not count its updates.
    assert Muon().state_bytes(stored(16, 512, element_bytes=2)) == 16 * 512 * 2
    assert Muon().state_bytes(stored(16, 512, name="output.weight", element_bytes=2)) == 2 * 16 * 512 * 2 + 4


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = AdamW(lr=0.1, weight_decay=0.5).implementation().build(dict(model.named_parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        # Without a gradient, only decay moves a parameter: p ← p·(1 − lr·decay).
        expected = before[name] * (1 - 0.1 * 0.5) if p.ndim == 2 else before[name]
        torch.testing.assert_close(p.detach(), expected)
    only_matrices = AdamW().implementation().build({"weight": nn.Parameter(torch.ones(2, 2))})
    assert [len(group["params"]) for group in only_matrices.param_groups] == [1]

"""Averages in few bits: which parameters have them, the bytes that they take, and what is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe import check
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.contract import Stored
from titanlab.techniques.optimizer.optimizers_schema import SMALLEST, AdamW4bit, AdamW8bit, AdamWFp8, packs

SCHEMAS = (AdamW8bit, AdamW4bit, AdamWFp8)


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


def test_a_cut_row_has_fewer_whole_blocks():
    """512 columns are four blocks of 128; on eight ranks no rank has a whole one, so that averages stay wide."""
    config = AdamW4bit()
    halves = Stored(name="w", shape=(64, 512), part=(64, 256), element_bytes=4)
    eighths = Stored(name="w", shape=(64, 512), part=(64, 64), element_bytes=4)
    assert config.state_bytes(halves) == 2 * (64 * 256 // 2 + 64 * 2 * 4) + 4
    assert config.state_bytes(eighths) == 2 * 64 * 64 * 4 + 4


def test_a_rank_without_rows_of_a_matrix_keeps_the_number_of_updates():
    for part in ((0, 512), (64, 0)):
        assert AdamW8bit().state_bytes(Stored(name="w", shape=(64, 512), part=part, element_bytes=4)) == 4


def test_in_a_small_model_blocks_fit_in_short_rows():
    reduced = AdamW8bit(lr=0.5, eps=1e-8, rounding="nearest").reduced(least_eps=1e-4)
    assert reduced == AdamW8bit(lr=0.5, eps=1e-4, rounding="nearest", block_size=16)
    assert AdamW4bit(eps=1e-3).reduced(least_eps=1e-4).eps == 1e-3


@pytest.mark.parametrize(
    ("config", "device", "key", "rule"),
    [
        (AdamW8bit(rounding="stochastic"), "NVIDIA H200", "optimizer.rounding", "rest in bfloat16"),
        (AdamWFp8(), "NVIDIA A100-SXM4-80GB", "optimizer.kind", "compute capability 8.9"),
    ],
)
def test_what_cannot_work_is_refused(config, device, key, rule):
    made = tiny.recipe("runs")
    made = replace(made, cluster=replace(made.cluster, accelerator="cuda", device=device))
    with pytest.raises(ConfigError, match=rule) as refused:
        check(replace(made, optimizer=config))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("schema", "accelerator", "device"),
    [
        (AdamWFp8, "cuda", "NVIDIA H100 80GB HBM3"),
        (AdamWFp8, "cuda", "NVIDIA L4"),
        # Of a device that is not in the table nothing is known; CPUs convert in software.
        (AdamWFp8, "cuda", "NVIDIA of tomorrow"),
        (AdamWFp8, "cpu", "cpu"),
        (AdamWFp8, "cpu", "NVIDIA A100-SXM4-80GB"),
        (AdamW8bit, "cuda", "NVIDIA A100-SXM4-80GB"),
        (AdamW4bit, "cuda", "Tesla V100-SXM2-16GB"),
    ],
)
def test_what_may_work_is_not_refused(schema, accelerator, device):
    schema().check(replace(setting(tiny.recipe("runs")), accelerator=accelerator, device=device))


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
    with pytest.raises(ConfigError) as refused:
        checked(32, 2)
    assert str(refused.value) == (
        "optimizer.block_size=32: is no divisor of the 48 columns of layers.0.attention.wo.weight on a rank of "
        "parallelism.tensor=2; the rank would keep full averages, and one process has few bits; try 16"
    )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_without_torchao_it_is_refused(monkeypatch, schema):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"^optimizer.kind={schema().kind}: needs the package torchao, .*optimizer=adamw"
    ):
        schema().check(setting(tiny.recipe("runs")))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rounding": "up"}, "optimizer.rounding"),
        ({"block_size": 0}, "optimizer.block_size"),
        ({"block_size": -2}, "optimizer.block_size"),
        # Two 4-bit codes are one byte.
        ({"block_size": 129}, "optimizer.block_size"),
    ],
)
def test_impossible_values_are_refused(change, key):
    with pytest.raises(ConfigError) as refused:
        AdamW8bit(**change)
    assert refused.value.key == key

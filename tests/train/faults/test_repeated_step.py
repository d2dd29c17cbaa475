"""Steps that run twice: they change no bit of a training, and a bit that differs ends it with rank and parameter."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.precision.test_fp16 import full
from titanlab.dtensor import local_part
from titanlab.errors import ConfigError
from titanlab.prove import parity
from titanlab.recipe import recipe_rules
from titanlab.records import OutcomeKind, classify
from titanlab.techniques.model import llama
from titanlab.train import train as loop
from titanlab.train.train import RepeatedStep, SilentCorruption


def random_feed_forward(self, hidden, whole=llama.FeedForward.forward):
    return whole(self, hidden) * (1 + 0.1 * torch.rand(()))


def trace_of(made, run):
    """Losses and parameters of a model that draws random numbers."""
    calls = 0
    whole = loop.generator_states

    def counted(world):
        nonlocal calls
        calls += 1
        return whole(world)

    tracer = parity.Tracer(made.layout)
    with (
        patch.object(llama.FeedForward, "forward", random_feed_forward),
        patch.object(loop, "generator_states", counted),
    ):
        tiny.as_rank(made, run, tracer)
    return calls, tracer.trace.losses, tracer.trace.parameters


@pytest.mark.parametrize(
    "layout", [{"shard": 2}, full({}), full({"pipeline": 2, "tensor": 2, "microbatch": 3})], ids=str
)
def test_the_check_changes_no_bit(pool, tmp_path, layout):
    found = []
    for every in (0, 2):
        made = tiny.recipe(tmp_path, name=f"every-{every}", steps=5, check_every=every, **layout)
        found.append(pool.run(made.world, trace_of, made, tiny.begin(made)))
    for (no_calls, losses, parameters), (calls, again, parameters_again) in zip(*found, strict=True):
        assert (no_calls, calls) == (0, 2)
        assert losses == again
        assert all(torch.equal(parameters[name], parameters_again[name]) for name in parameters)


def corrupted(made, run, rank, where):
    """Train; at step 4, one bit of one rank's gradient or loss is another in the second of two runs."""
    whole = RepeatedStep.after

    def after(self, step, sums):
        if self._first is not None and int(os.environ["RANK"]) == rank:
            if where == "loss":
                sums.loss_sum.view(1).view(torch.uint8)[0] ^= 1
            else:
                gradient = local_part(self._assembled.model.get_parameter("layers.1.attention.wk.weight").grad)
                gradient.view(-1).view(torch.uint8)[5] ^= 1
        whole(self, step, sums)

    with patch.object(RepeatedStep, "after", after):
        try:
            tiny.as_rank(made, run)
        except SilentCorruption as error:
            return str(error), classify(error)
    return None


@pytest.mark.parametrize(
    ("where", "what"), [("loss", "the loss"), ("gradient", "the gradient of layers.1.attention.wk.weight (1 byte)")]
)
def test_a_bit_that_differs_ends_the_run_and_names_rank_and_parameter(pool, tmp_path, where, what):
    made = tiny.recipe(tmp_path, steps=6, check_every=4, shard=2)
    line = f"silent data corruption at step 4: rank 1 computed {what} twice with different results"
    assert pool.run(2, corrupted, made, tiny.begin(made), 1, where) == [(line, OutcomeKind.NODE_FAIL)] * 2


def test_a_rule_on_gpus(tmp_path, monkeypatch):
    made = tiny.recipe(tmp_path, check_every=4)
    made = replace(made, cluster=replace(made.cluster, accelerator="cuda"))
    with pytest.raises(
        ConfigError, match=r"training\.check_every=4: compares bits, and without training\.deterministic"
    ):
        recipe_rules.check_training(made)
    recipe_rules.check_training(replace(made, training=replace(made.training, deterministic=True)))

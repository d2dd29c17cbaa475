"""Counts of experts' tokens, what is made of them, and their rows in metrics.jsonl: few, and equal in all layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.model.test_mixture_of_experts import model as made_layer
from tests.prove.test_experts import SIZES
from titanlab.costs import meter
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing
from titanlab.techniques.model.llama_schema import Qwen3Moe
from titanlab.techniques.model.mixture_of_experts import Auxiliary, Router
from titanlab.train import Observer, Totals
from titanlab.train.initialise import initialise
from titanlab.train.recording import ExpertRows
from titanlab.train.totals import Balance, Load

MODEL = Qwen3Moe(**{**SIZES, "layers": 2}, head_dim=32, ffn_dim=32, experts=8, active_experts=2, bias_rate=0.01)


class Watched(Observer):
    def __init__(self):
        self.loads: list[Load] = []

    def after_step(self, step: int, totals: Totals) -> None:
        self.loads.append(totals.load)


def recipe(folder, **given):
    return tiny.recipe(folder, **{"model": MODEL, "steps": 4, "global_batch": 4, "microbatch": 2, **given})


def loads(made, run=None):
    watched = Watched()
    run = run or tiny.begin(made)
    tiny.as_rank(made, run, observer=watched)
    return watched.loads, run


def test_each_token_counts_once_whatever_is_computed_again_or_evaluated(tmp_path):
    plain, run = loads(recipe(tmp_path))
    other, _ = loads(recipe(tmp_path, ac=FullCheckpointing(), validate_every=1, validation_sequences=2, check_every=2))
    assert [load.counts for load in plain] == [load.counts for load in other]
    for load in plain:
        assert [sum(block) for block in load.counts] == [4 * 32 * 2] * 2
        assert 0 < load.entropy < 2.08  # ln 8
        assert load.most >= 1
    rows = run.metrics("train")
    assert [row[meter.EXPERT_LOAD] for row in rows] == [load.most for load in plain]
    assert [row[meter.DROPPED_SHARE] for row in rows] == [0.0] * 4
    assert [row["counts"] for row in run.metrics("experts")] == [load.counts for load in plain]
    # For its tracker they are too many.
    assert "counts" not in json.dumps(rows)


def test_load_and_entropy_are_those_of_a_token_and_of_the_fullest_expert():
    # Two blocks of two experts, and two tokens that take both experts; in the second block one takes one expert twice.
    load = Load(counts=[[2.0, 2.0], [3.0, 1.0]], entropies=[1.2, 0.4], active=2)
    assert (load.most, load.entropy) == (1.5, pytest.approx(0.4))


@pytest.mark.full
def test_biases_move_against_the_load(tmp_path):
    found = {}
    for rate in (0.0, 1e-3):
        made = recipe(tmp_path, model=replace(MODEL, bias_rate=rate), steps=60, every=60, global_batch=16, microbatch=8)
        counts, run = loads(made)
        found[rate] = sum(load.most for load in counts[-20:]) / 20
    assert found[1e-3] < 0.9 * found[0.0]
    saved = json.loads((run.path / "checkpoints" / "step-00000060" / "position.json").read_text())["routing"]
    assert list(saved) == ["layers.0", "layers.1"]
    assert all(abs(value) <= 0.0601 for value in saved["layers.0"])
    assert any(abs(value) > 0.003 for value in saved["layers.0"])


@pytest.mark.parametrize(
    ("balance", "layout"),
    [pytest.param("bias", {}, marks=pytest.mark.full), ("auxiliary_batch", {}), ("bias", {"pipeline": 2})],
)
def test_a_resumed_run_goes_on_with_its_biases(pool, tmp_path, balance, layout):
    """Or with the shares of the last step's tokens."""
    model = replace(MODEL, balance=balance, auxiliary_weight=1.0)
    made = recipe(tmp_path, model=model, steps=6, every=3, **layout)
    run = tiny.begin(made)
    straight = pool.run(made.world, tiny.traced, made, run)[0]
    (run.path / "checkpoints" / "step-00000006").rename(tmp_path / "away")
    again = pool.run(made.world, tiny.traced, made, tiny.begin(made, run))[0]
    assert (again.loads, again.losses) == (straight.loads[3:], straight.losses[3:])


def test_a_bias_moves_by_its_rate_against_the_load_of_a_step(tmp_path):
    made = recipe(tmp_path, steps=2, every=1)
    (load, _), run = loads(made)
    saved = json.loads((run.path / "checkpoints" / "step-00000001" / "position.json").read_text())["routing"]
    for layer, counts in enumerate(load.counts):
        # 4 sequences of 32 tokens, 2 of 8 experts each: 32 of an expert if all were alike.
        wanted = [0.01 * ((count < 32) - (count > 32)) for count in counts]
        assert saved[f"layers.{layer}"] == pytest.approx(wanted)


def test_a_run_trains_on_the_auxiliary_loss_once(tmp_path):
    """The gradient of the first step is that of the mean over labels of both losses, in plain PyTorch."""
    weight = 0.5
    model = replace(MODEL, balance="auxiliary_sequence", auxiliary_weight=weight)
    made = recipe(tmp_path, model=model, steps=2, max_grad_norm=None)
    found = tiny.traced(made, tiny.begin(made)).gradients
    plain = made.model.implementation().build(seq_len=32)
    initialise(plain, made.model.initial_values(), made.seed)
    stream = source.open_train(made.data, seed=made.seed, seq_len=32, global_batch=4, rank=0, ranks=1)
    batch = stream.next_batch()
    auxiliary = []

    def add(router, inputs, output):
        scores = (inputs[0] @ router.weight.t()).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
        shares, means = (each.view(4, 32, 8).mean(1) for each in (chosen / 2, scores))
        auxiliary.append(weight * 8 * (shares * means).sum(-1).mean())

    for module in plain.modules():
        if isinstance(module, Router):
            module.register_forward_hook(add)
    logits = plain(torch.from_numpy(batch.tokens))
    (F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten()) + sum(auxiliary)).backward()
    assert len(auxiliary) == 2
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("balance", ["auxiliary_batch", "none"])
def test_without_biases_nothing_else_is_saved(tmp_path, balance):
    made = recipe(tmp_path, model=replace(MODEL, balance=balance), steps=2, every=2)
    _, run = loads(made)
    saved = json.loads((run.path / "checkpoints" / "step-00000002" / "position.json").read_text())
    if balance == "none":
        assert "routing" not in saved
    else:
        assert sum(saved["routing"]["layers.1"]) == pytest.approx(1)


def test_the_state_of_another_model_is_one_line():
    balance = Balance([], MODEL.account(), torch.device("cpu"), counts=True, parts=1, scale=1.0, seq_len=8)
    with pytest.raises(ConfigError, match="has 3 numbers, and block 0 has 8 experts"):
        balance.restore({"layers.0": [0.0] * 3})


@pytest.mark.parametrize("form", ["sequence", "batch"])
def test_the_auxiliary_gradient_is_that_of_the_loss(form):
    """Of weight · N · Σ share · mean probability, for each sequence, times its tokens."""
    layer, seq_len, weight, scale = made_layer(), 6, 0.3, 0.25
    hidden = torch.randn(2, seq_len, 12, generator=torch.Generator().manual_seed(1))
    tokens, count = hidden.flatten(0, 1), layer.count
    scores = (tokens @ layer.router.weight.t()).softmax(-1)
    given = torch.rand(count, generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0).view(2, seq_len, count)
    shares = chosen.mean(1) / 2 if form == "sequence" else given.expand(2, count)
    loss = weight * count * (shares * scores.view(2, seq_len, count).mean(1)).sum() * seq_len * scale
    (wanted,) = torch.autograd.grad(loss, layer.router.weight)

    layer.router.auxiliary = Auxiliary(None if form == "sequence" else given, weight, scale, seq_len)
    with_auxiliary = torch.autograd.grad(layer.router(tokens).weights.square().sum(), layer.router.weight)[0]
    layer.router.auxiliary = None
    without = torch.autograd.grad(layer.router(tokens).weights.square().sum(), layer.router.weight)[0]
    torch.testing.assert_close(with_auxiliary - without, wanted, rtol=1e-4, atol=1e-6)


def test_a_sequence_in_parts_cannot_be_counted(tmp_path):
    with pytest.raises(ConfigError, match="model.balance=auxiliary_sequence: counts by sequence, and context=2"):
        recipe(tmp_path, model=replace(MODEL, balance="auxiliary_sequence"), context=2)


def written(steps, done, counts=lambda step: [[float(step), 1.0]]):
    rows = {}
    experts = ExpertRows(steps, lambda step, row: rows.update({step: row}))
    for step in done:
        experts.after_step(step, Load(counts(step), [0.0], 1))
    experts.at_end(done[-1])
    return rows


def test_rows_are_at_equal_distances_and_sum_what_lies_between():
    rows = written(1000, range(1, 1001))
    assert list(rows) == [1, *range(50, 1001, 50)]
    assert [row["steps"] for row in rows.values()] == [1, 49, *[50] * 19]
    assert rows[100]["counts"] == [[sum(range(51, 101)), 50]]
    assert all(isinstance(count, int) for count in rows[50]["counts"][0])


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 21, 39, 999])
def test_a_run_of_any_length_has_few_rows_and_its_last_step(steps):
    rows = written(steps, range(1, steps + 1))
    assert len(rows) <= 22
    assert max(rows) == steps
    assert sum(row["steps"] for row in rows.values()) == steps


def test_steps_that_are_done_again_are_counted_once():
    rows = {}
    experts = ExpertRows(100, lambda step, row: rows.update({step: row}))
    for step in (2, 3):
        experts.after_step(step, Load([[1.0]], [0.0], 1))
    experts.go_back()
    for step in (2, 3, 4, 5):
        experts.after_step(step, Load([[1.0]], [0.0], 1))
    assert rows == {5: {"steps": 4, "counts": [[4]]}}


def test_layouts_have_the_same_rows(pool, tmp_path):
    """Each stage of a pipeline holds its own blocks, and each rank counts its own tokens."""
    alone = recipe(tmp_path / "1")
    wanted = counts_of(alone, pool)
    spread = recipe(tmp_path / "2", shard=2, pipeline=2, expert=2, microbatch=1)
    assert counts_of(spread, pool) == wanted
    assert len(wanted) == 4
    assert {len(row["counts"]) for row in wanted} == {2}


def counts_of(made, pool):
    run = tiny.begin(replace(made))
    pool.run(made.world, tiny.as_rank, made, run)
    return [{"step": row["step"], "steps": row["steps"], "counts": row["counts"]} for row in run.metrics("experts")]

"""Optimizers of few bits, stochastic rounding and Muon: torchao's and torch's numbers, whatever the layout."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from tests import tiny
from tests.optimizer.layouts import CUTS, gentle, gradients, parameters, stepped
from tests.pool import RankFailure
from tests.train.test_resume import STEPS, STOP, attempt, same_bits, stopped
from titanlab.checkpoint.folders import step_folder
from titanlab.system import import_quietly
from titanlab.techniques.optimizer.contract import Schedule
from titanlab.techniques.optimizer.optimizers_schema import AdamW, AdamW4bit, AdamW8bit, AdamWFp8, Muon

LOW_BIT = (AdamW8bit, AdamW4bit, AdamWFp8)
ALL = (*LOW_BIT, Muon)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def in_blocks(schema, size=32):
    """A gentle config, whose blocks fit into the rows of a tiny model."""
    return gentle(schema) if schema is Muon else gentle(schema, block_size=size)


@pytest.mark.parametrize("schema", LOW_BIT)
def test_the_numbers_are_torchaos(schema):
    """torchao's own optimizer, eager: the same bits, since these rows are whole blocks."""
    config = schema()
    theirs_of = {AdamW8bit: "AdamW8bit", AdamW4bit: "AdamW4bit", AdamWFp8: "AdamWFp8"}[schema]
    held = parameters()
    matrices = [p for p in held.values() if p.ndim == 2]
    vectors = [{"params": [p for p in held.values() if p.ndim == 1], "weight_decay": 0.0}]
    theirs = getattr(import_quietly("torchao.optim"), theirs_of)(
        [{"params": matrices}, *vectors], lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay
    )
    for step in range(5):
        for name, gradient in gradients(step).items():
            held[name].grad = gradient
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    ours, _ = stepped(config)
    assert all(torch.equal(ours[name], p.detach()) for name, p in held.items())


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_the_numbers_are_torchs(adjust):
    config = Muon(weight_decay=0.2, adjust_lr=adjust)
    held = parameters()
    matrices = [p for name, p in held.items() if name.startswith("layers.") and p.ndim == 2]
    others = [p for p in held.values() if not any(p is each for each in matrices)]
    theirs = torch.optim.Muon(matrices, lr=config.lr, weight_decay=0.2, adjust_lr_fn=adjust)
    groups = [{"params": [others[0]]}, {"params": [others[1]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.2, fused=True)
    for step in range(5):
        for name, gradient in gradients(step).items():
            held[name].grad = gradient
        theirs.step()
        adamw.step()
    ours, _ = stepped(config)
    assert same_bits(ours, {name: p.detach() for name, p in held.items()})


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        *((AdamW8bit(block_size=128), cut) for cut in ("fsdp", "columns")),
        *((Muon(), cut) for cut in ("fsdp", "fsdp and rows")),
        *(full(AdamW8bit(block_size=128), cut) for cut in CUTS if " " in cut),
        *(full(schema(block_size=128), cut) for schema in LOW_BIT[1:] for cut in CUTS if cut != "copies"),
        *(full(Muon(), cut) for cut in ("columns", "fsdp and columns")),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_given_gradients_move_parameters_alike_in_every_layout(pool, config, cut):
    """Bit for bit: blocks lie in the matrix, and not in what a rank has of it; torch's own Muon is not, on parts."""
    expected, _ = stepped(config)
    for found, _ in pool.run(torch.Size(CUTS[cut][0]).numel(), stepped, config, cut):
        assert same_bits(found, expected)


@pytest.mark.parametrize("cut", ["copies", "fsdp", pytest.param("fsdp and columns", marks=pytest.mark.full)])
def test_copies_are_rounded_alike(pool, cut):
    """Stochastic rounding draws by name, step and place; ranks that draw for parts of other sizes stay in step."""
    ranks = torch.Size(CUTS[cut][0]).numel()
    results = pool.run(ranks, stepped, AdamW(), cut, 3, torch.bfloat16)
    wholes, locals_ = zip(*results, strict=True)
    assert all(same_bits(each, wholes[0]) for each in wholes)
    if cut == "copies":
        assert same_bits(locals_[0], locals_[1])
        # As one process does it.
        assert same_bits(wholes[0], stepped(AdamW(), None, 3, torch.bfloat16)[0])


def test_stochastic_rounding_keeps_the_mean():
    """Updates of a 1/2048 of bf16's step at 1: to the nearest none arrives, stochastically all do on average."""

    def moved(rounding, name="weight"):
        config = AdamW(lr=2.0**-12, weight_decay=0.0, rounding=rounding)
        held = {name: nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))}
        optimizer = config.implementation().build(held)
        for _ in range(8):
            held[name].grad = torch.full_like(held[name], 0.5)
            optimizer.step()
        return held[name].detach()

    assert torch.equal(moved("nearest"), torch.ones(1 << 16, dtype=torch.bfloat16))
    state = torch.get_rng_state()
    once = moved("auto")
    assert torch.equal(state, torch.get_rng_state())
    # 65,536 elements, each with a deviation of at most half a step of 1/256 a step: 8·2⁻¹² within 2 %.
    assert float(1 - once.float().mean()) == pytest.approx(8 * 2.0**-12, rel=0.02)
    assert torch.equal(once, moved("stochastic"))
    assert not torch.equal(once, moved("auto", "another"))


def test_muons_momentum_in_bf16_is_not_divided_in_place():
    before = parameters(torch.bfloat16)
    found, _ = stepped(Muon(nesterov=False), None, 2, torch.bfloat16)
    config = Muon(nesterov=False)
    optimizer = config.implementation().build(before)
    name = "layers.0.attention.wq.weight"
    for each, gradient in gradients(0).items():
        before[each].grad = gradient.bfloat16()
    optimizer.step()
    average = optimizer.state[before[name]]["momentum_buffer"]
    torch.testing.assert_close(average, (gradients(0)[name] * 0.05).bfloat16(), rtol=0.02, atol=1e-5)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize(
    ("schema", "layout"),
    [
        *((schema, {}) for schema in (AdamW8bit, Muon)),
        *(full(schema, {}) for schema in (AdamW4bit, AdamWFp8)),
        *(full(schema, {"shard": 2}) for schema in (AdamW8bit, Muon)),
        *(full(schema, {"shard": 2, "tensor": 2}) for schema in ALL),
        *(full(schema, {"pipeline": 2, "microbatch": 2}) for schema in ALL),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(pool, tmp_path, schema, layout):
    given = {"optimizer": in_blocks(schema), **layout}
    made, run, _ = stopped(pool, tmp_path, **given)
    straight = tiny.recipe(tmp_path, name="straight", steps=STEPS, data=made.data, **given)
    expected = pool.run(made.world, attempt, straight, tiny.begin(straight))[0].trace
    after = pool.run(made.world, attempt, made, tiny.begin(made, run))[0].trace
    assert after.losses == expected.losses[STOP:]
    assert same_bits(after.parameters, expected.parameters)


@pytest.mark.full
@pytest.mark.parametrize("schema", ALL)
def test_a_run_goes_on_under_another_layout(pool, tmp_path, schema):
    given = {"optimizer": in_blocks(schema)}
    made, run, _ = stopped(pool, tmp_path, shard=2, tensor=2, **given)
    straight = tiny.recipe(tmp_path, name="straight", steps=STEPS, data=made.data, **given)
    expected = pool.run(1, attempt, straight, tiny.begin(straight))[0].trace
    single = tiny.changed(made, shard=1, tensor=1)
    after = pool.run(1, attempt, single, tiny.begin(single, run))[0].trace
    assert after.losses == pytest.approx(expected.losses[STOP:], rel=1e-5)


def test_a_layout_that_keeps_a_matrix_in_full_refuses_its_few_bits_in_one_line(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=4, every=2, keep=0, optimizer=gentle(AdamW8bit, block_size=64))
    run = tiny.begin(made)
    pool.run(1, attempt, made, run)
    shutil.rmtree(step_folder(run.checkpoints, 4))
    cut = tiny.changed(made, tensor=2)
    with pytest.raises(RankFailure) as refused:
        pool.run(2, attempt, cut, tiny.begin(cut, run))
    assert "wo.weight.exp_avg in few bits, and this run has it in full precision: " in str(refused.value)
    assert "resume under its layout (parallelism." in str(refused.value)
    assert step_folder(run.checkpoints, 2).is_dir()


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (
            gentle(AdamW8bit, block_size=64),
            "exp_avg in full precision, and this run has it in few bits: its optimizer has another kind",
        ),
        (Muon(schedule=Schedule(warmup_steps=1)), "has no momentum_buffer of .*: it was saved with another optimizer"),
    ],
)
def test_a_run_from_a_checkpoint_of_another_optimizer_is_refused_in_one_line(pool, tmp_path, config, rule):
    made = tiny.recipe(tmp_path, steps=2, every=2)
    run = tiny.begin(made)
    pool.run(1, attempt, made, run)
    other = tiny.recipe(tmp_path, name="other", steps=4, load_from=str(run.path), optimizer=config)
    with pytest.raises(
        RankFailure, match=f"ConfigError: checkpoint.load_from=.*{rule}.*keep its optimizer.*init_from="
    ):
        pool.run(1, attempt, other, tiny.begin(other))

"""Muon: torch's numbers for whole matrices, whatever the layout, and AdamW for the rest."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.optimizer.layouts import CUTS, gentle, gradients, hold_layouts, parameters, stepped, traced
from tests.training.test_resume import STEPS, STOP, attempt, same_bits, stopped
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.train.train import _set_rate

# The iteration runs in bfloat16: where a gradient's last bit turns a rounding, an element enters 0.4 % larger or smaller,
# and small singular directions are enlarged most. Five steps leave 1.3e-3 of a parameter; losses hardly see it.
BAND = 5e-3


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
    "cut",
    ["fsdp", "fsdp and rows", *(pytest.param(c, marks=pytest.mark.full) for c in ("columns", "fsdp and columns"))],
)
def test_given_gradients_move_parameters_alike_in_every_layout(pool, cut):
    """Bit for bit; torch's own is not, on parts."""
    expected, _ = stepped(Muon())
    for found, _ in pool.run(torch.Size(CUTS[cut][0]).numel(), stepped, Muon(), cut):
        assert same_bits(found, expected)


def test_momentum_in_bf16_is_not_divided_in_place():
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


def test_it_is_one_optimizer():
    made = tiny.recipe("runs", optimizer=gentle(Muon))
    optimizer = made.optimizer.implementation().build(parameters())
    _set_rate(optimizer, made, 1)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [
        (5, 5e-4),
        (1, 5e-4),
        (1, 5e-4),
    ]
    # What it loads is what its parts use.
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    optimizer.load_state_dict(state)
    assert [part.param_groups for part in optimizer._parts] == [optimizer.param_groups[:1], optimizer.param_groups[1:]]
    assert optimizer._parts[0].param_groups[0]["lr"] == 7.0
    assert all(part.state is optimizer.state for part in optimizer._parts)


@pytest.mark.full
def test_a_layout_trains_as_one_process(pool, tmp_path):
    def trained(**layout):
        made = tiny.recipe(tmp_path, layers=4, steps=5, global_batch=8, optimizer=gentle(Muon), **layout)
        return pool.run(made.world, traced, made, tiny.begin(made))[0]

    hold_layouts(trained, BAND)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        pytest.param({"shard": 2}, marks=pytest.mark.full),
        pytest.param({"shard": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "microbatch": 2}, marks=pytest.mark.full),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(pool, tmp_path, layout):
    given = {"optimizer": gentle(Muon), **layout}
    made, run, _ = stopped(pool, tmp_path, **given)
    straight = tiny.recipe(tmp_path, name="straight", steps=STEPS, data=made.data, **given)
    expected = pool.run(made.world, attempt, straight, tiny.begin(straight))[0].trace
    after = pool.run(made.world, attempt, made, tiny.begin(made, run))[0].trace
    assert after.losses == expected.losses[STOP:]
    assert same_bits(after.parameters, expected.parameters)


@pytest.mark.full
def test_a_run_goes_on_under_another_layout(pool, tmp_path):
    made, run, _ = stopped(pool, tmp_path, shard=2, tensor=2, optimizer=gentle(Muon))
    straight = tiny.recipe(tmp_path, name="straight", steps=STEPS, data=made.data, optimizer=gentle(Muon))
    expected = pool.run(1, attempt, straight, tiny.begin(straight))[0].trace
    single = tiny.changed(made, shard=1, tensor=1)
    after = pool.run(1, attempt, single, tiny.begin(single, run))[0].trace
    assert after.losses == pytest.approx(expected.losses[STOP:], rel=1e-5)

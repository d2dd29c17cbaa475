"""A checkpoint goes on under another degree of expert parallelism, with every bit of parameters and optimizer."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.prove.test_experts import MODELS
from titanlab.checkpoint import latest, read_contents, whole_tensor
from titanlab.checkpoint.loading import whole_state
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.train import train

STEPS = 2
AVERAGES = ("exp_avg", "exp_avg_sq")
# Expert degrees 4 and 1 after 2, and 2 again.
LATER = ({"shard": 4, "expert": 4}, {"shard": 2, "pipeline": 2}, {"shard": 2, "expert": 2})


def loaded(made, run):
    """The trace, and the optimizer's averages as they are after loading: full tensors by name."""
    averages = {}
    unpatched = train.load_start

    def load_start(recipe, run, attempt, model, optimizer, world, **given):
        found = unpatched(recipe, run, attempt, model, optimizer, world, **given)
        flat = whole_state(model, optimizer)
        own = {name.removeprefix("optimizer."): value for name, value in flat.items() if name.endswith(AVERAGES)}
        averages.update(parity._everywhere(own, recipe.layout))
        return found

    with patch.object(train, "load_start", load_start):
        trace = parity.trace(made, run, joined(os.environ) or ALONE)
    return trace, averages


def saved(run):
    """The optimizer's averages in a run's checkpoint: full tensors by name."""
    contents = read_contents(latest(run.checkpoints), "run")
    names = [name for name in contents.tensors if name.startswith("optimizer.") and name.endswith(AVERAGES)]
    return {name.removeprefix("optimizer."): whole_tensor(contents, name) for name in names}


@pytest.mark.full
def test_degrees_2_4_and_1(pool, tmp_path):
    """A step of a rate of nothing changes the averages, which the next layout loads, and no parameter."""
    first = tiny.recipe(
        tmp_path / "a", model=MODELS["qwen3"], steps=STEPS, global_batch=8, shard=2, tensor=2, expert=2, every=STEPS
    )
    place = tiny.begin(first)
    wanted = pool.run(4, tiny.traced, first, place)[0].parameters
    for number, layout in enumerate(LATER):
        steps = STEPS + 1 + number
        made = tiny.recipe(
            tmp_path / str(number), model=MODELS["qwen3"], steps=steps, global_batch=8, microbatch=2, every=steps,
            load_from=str(place.path), lr=1e-30, **layout,
        )  # fmt: skip
        before, place = saved(place), tiny.begin(made)
        trace, averages = pool.run(made.world, loaded, made, place)[0]
        for name, value in wanted.items():
            assert torch.equal(trace.parameters[name], value), name
        assert before.keys() == averages.keys()
        assert len(before) == 2 * len(wanted)
        for name, value in before.items():
            assert torch.equal(averages[name], value), name
            assert value.abs().max() > 0, name
        # The step has changed them, so the next layout loads others.
        after = saved(place)
        assert any(not torch.equal(after[name], value) for name, value in before.items())

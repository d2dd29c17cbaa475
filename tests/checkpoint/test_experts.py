"""A checkpoint goes on under another degree of expert parallelism, with every bit."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.parity.test_experts import MODELS, traced
from titanlab.records.run_folder import RunFolder

STEPS = 2


def saved(made, run):
    """Train to the end; the parameters then."""
    return traced(made, run).parameters


@pytest.mark.full
def test_degrees_2_4_and_1(pool, tmp_path):
    """Runs that load and train no step have exactly what was saved."""
    first = tiny.recipe(
        tmp_path / "a", model=MODELS["qwen3"], steps=STEPS, global_batch=8, shard=2, tensor=2, expert=2, every=STEPS
    )
    run = tiny.begin(first)
    wanted = pool.run(4, traced, first, run)[0]
    place, experts = run, []
    for number, layout in enumerate(
        ({"shard": 4, "expert": 4}, {"shard": 2, "pipeline": 2}, {"shard": 2, "expert": 2})
    ):
        steps = STEPS + 1 + number
        made = tiny.recipe(
            tmp_path / str(number), model=MODELS["qwen3"], steps=steps, global_batch=8, microbatch=2, every=steps,
            load_from=str(place.path), lr=1e-30, **layout,
        )  # fmt: skip
        place = tiny.begin(made)
        experts.append(pool.run(made.world, traced, made, place)[0])
    for found in experts:
        for name, value in wanted.parameters.items():
            assert torch.equal(found.parameters[name], value), name
    assert isinstance(place, RunFolder)

"""Parts of a step from real runs: they add up, and each has what the layout makes it do."""

import pytest

from tests import tiny
from titanlab.costs import meter
from titanlab.techniques.profiler.profilers_schema import Breakdown

STEP = "breakdown/step(s)"
LAYOUTS = {
    "one process": (1, {}, set()),
    "DDP": (2, {"replicate": 2}, {"replicate"}),
    "FSDP": (2, {"shard": 2}, {"shard"}),
    "FSDP and tensor": (4, {"shard": 2, "tensor": 2}, {"shard", "tensor"}),
    "context": (2, {"context": 2}, {"context"}),
    "pipeline": (2, {"pipeline": 2, "microbatch": 3}, {"pipeline"}),
}


def trained(made, run):
    return tiny.as_rank(made, run).kind


# The others show each kind of event too.
SLOWER = ("DDP", "one process", "FSDP", "context", "FSDP and tensor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOWER else []) for name in LAYOUTS]
)
def test_the_parts_add_up_to_the_step(name, pool, tmp_path):
    world, layout, axes = LAYOUTS[name]
    profiler = Breakdown(skip=2, steps=2, every=0)
    made = tiny.recipe(tmp_path, steps=5, every=3, profiler=profiler, **layout)
    run = tiny.begin(made)
    pool.run(world, trained, made, run)
    (row,) = run.metrics("breakdown")
    assert row["step"] == 4
    parts = {key: value for key, value in row.items() if key.startswith("breakdown/") and key != STEP}
    assert sum(parts.values()) == pytest.approx(row[STEP])
    for part in ("data", "forward", "backward", "optimizer", "checkpoint"):
        assert parts[f"breakdown/{part}(s)"] > 0
    exposed = {key.removeprefix("breakdown/exposed_").removesuffix("(s)") for key in parts if "exposed_" in key}
    assert axes <= exposed
    assert exposed - axes <= {"world", "other_group"}


def test_sampling_changes_no_loss_and_repeats(pool, tmp_path):
    losses = []
    for name, given in {"off": {}, "breakdown": {"profiler": Breakdown(skip=2, steps=1, every=3)}}.items():
        made = tiny.recipe(tmp_path, name=name, steps=6, shard=2, **given)
        run = tiny.begin(made)
        pool.run(2, trained, made, run)
        losses.append([row[meter.LOSS] for row in run.metrics("train")])
    assert losses[0] == losses[1]
    assert [row["step"] for row in run.metrics("breakdown")] == [3, 6]
    assert "step 6, mean over ranks:" in (run.logs / "rank-0.log").read_text()

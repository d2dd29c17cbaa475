"""Profilers that record windows of steps: their rules, what each reports, and that they change nothing of the run."""

import gzip
import json

import pytest

from tests import tiny
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.techniques.profiler.profilers_schema import Breakdown, Memory, Rates, Trace


@pytest.mark.parametrize(
    ("config", "given", "line"),
    [
        *((config, {"skip": 1}, r"skip=1: must be at least 2; try 5") for config in (Breakdown, Trace)),
        *((config, {"steps": 0}, r"steps=0: must be at least 1; try 3") for config in (Breakdown, Trace, Memory)),
        (Trace, {"every": 4}, r"every=4: must be 0, or at least 5: a window has 3 steps, and one to warm up; try 300"),
        (Memory, {"skip": 0}, r"skip=0: must be at least 1; try 5"),
        (Memory, {"entries": 0}, r"entries=0: must be at least 1; try 100000"),
        (Memory, {"every": 3}, r"every=3: must be 0, or at least 4: a window has 3 steps; try 300"),
        (Rates, {"seconds": 0.0}, r"seconds=0\.0: must be a positive number"),
        (Rates, {"largest": 63}, r"largest=63: must be at least 64"),
        (Rates, {"megabytes": 0}, r"megabytes=0: must be at least 1"),
    ],
)
def test_rules(config, given, line):
    with pytest.raises(ConfigError, match=rf"^profiler\.{line}"):
        config(**given)


@pytest.mark.parametrize("kind", [Trace, Memory])
@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (10, [5, 15, 25])])
def test_windows_begin_as_scheduled_and_traces_warm_up_in_the_step_before(kind, every, steps):
    config = kind(skip=5, steps=3, every=every)
    before = 1 if kind is Trace else 0
    assert [done for done in range(30) if config.begins_after(done)] == [step - before for step in steps]


def trained(made, run):
    return tiny.as_rank(made, run).kind


def test_windows_change_no_loss_and_repeat(pool, tmp_path):
    # A folder may have any name.
    folder, runs = tmp_path / "{sweep}", {}
    for profiler in (None, Trace(skip=2, steps=1, every=3), Breakdown(skip=2, steps=1, every=3)):
        given = {} if profiler is None else {"profiler": profiler}
        made = tiny.recipe(folder, name=getattr(profiler, "kind", "off"), steps=6, shard=2, **given)
        runs[made.name] = tiny.begin(made)
        pool.run(2, trained, made, runs[made.name])
    losses = [[row[meter.LOSS] for row in run.metrics("train")] for run in runs.values()]
    assert losses[0] == losses[1] == losses[2]
    # A file for each rank and window.
    traces = sorted(runs["trace"].traces.iterdir())
    assert [path.name for path in traces] == [
        f"attempt-1-steps-{steps}-rank-{rank}.json.gz" for steps in ("3-3", "6-6") for rank in (0, 1)
    ]
    for path in traces:
        content = json.loads(gzip.decompress(path.read_bytes()))
        names = {event.get("name", "") for event in content["traceEvents"]}
        assert "aten::mm" in names
        assert any("all_gather" in name or "allgather" in name for name in names)
    # A row for each window.
    assert [row["step"] for row in runs["breakdown"].metrics("breakdown")] == [3, 6]
    assert "step 6, mean over ranks:" in (runs["breakdown"].logs / "rank-0.log").read_text()


STEP = "breakdown/step(s)"
LAYOUTS = {
    "one process": (1, {}, set()),
    "DDP": (2, {"replicate": 2}, {"replicate"}),
    "FSDP": (2, {"shard": 2}, {"shard"}),
    "FSDP and tensor": (4, {"shard": 2, "tensor": 2}, {"shard", "tensor"}),
    "context": (2, {"context": 2}, {"context"}),
    "pipeline": (2, {"pipeline": 2, "microbatch": 3}, {"pipeline"}),
}
# The pipeline shows each kind of event.
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

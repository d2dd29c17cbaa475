"""Profilers that record windows of steps: their rules, what each reports, and that they change nothing of the run."""

import csv
import gzip
import json

import pytest
import torch

from tests import tiny
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.options import combination
from titanlab.recipe import from_mapping, to_mapping
from titanlab.techniques.profiler.memory import _Sampler, layers_of
from titanlab.techniques.profiler.profilers_schema import Breakdown, Memory, NoProfiling, Rates, Trace
from titanlab.techniques.profiler.trace import line, mean, step_parts


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
        f"attempt-1-steps-{steps}-rank-{rank}.{kind}"
        for steps in ("3-3", "6-6")
        for rank in (0, 1)
        for kind in ("json.gz", "operators.csv")
    ]
    # The costliest operator comes first, in the table and in rank 0's row.
    (first, *rows) = list(csv.DictReader(traces[1].read_text().splitlines()))
    seconds = [float(row["host_seconds"]) for row in (first, *rows)]
    assert seconds == sorted(seconds, reverse=True)
    assert {"aten::mm", "aten::add"} <= {row["operator"] for row in rows} | {first["operator"]}
    reported = runs["trace"].metrics("operators")
    assert [row["step"] for row in reported] == [3, 6]
    assert reported[0][f"operators/{first['operator']}(s)"] == pytest.approx(seconds[0], rel=1e-3)
    assert f"costliest operators of rank 0: {first['operator']}" in (runs["trace"].logs / "rank-0.log").read_text()
    for path in traces[::2]:
        content = json.loads(gzip.decompress(path.read_bytes()))
        names = {event.get("name", "") for event in content["traceEvents"]}
        assert "aten::mm" in names
        assert any("all_gather" in name or "allgather" in name for name in names)
    # A row for each window.
    assert [row["step"] for row in runs["breakdown"].metrics("breakdown")] == [3, 6]
    assert "step 6, mean over ranks:" in (runs["breakdown"].logs / "rank-0.log").read_text()
    # What memory held in the step before each window: halves of the model, and AdamW's two states of each.
    rows = runs["breakdown"].metrics("memory_by_item")
    assert [row["step"] for row in rows] == [3, 6]
    half = made.model.account().parameter_count * 4 / 2 / 2**30
    for row in rows:
        assert row["memory_by_item/parameters(GiB)"] == pytest.approx(half, rel=0.02)
        assert row["memory_by_item/gradients(GiB)"] == pytest.approx(half, rel=0.02)
        assert row["memory_by_item/optimizer_state(GiB)"] == pytest.approx(2 * half, rel=0.02)
        assert row["memory_by_item/rest(GiB)"] > 0.05
        assert row["memory_by_item/rank"] in (0, 1)


def both(**given):
    """The config of `profiler=[trace,memory]`."""
    made = combination("profiler", "+".join(given))
    return made.schema(**given)


def trained_as_written(mapping, run):
    """A combination's class is made in each process: other processes get plain values."""
    return trained(from_mapping(mapping), run)


def test_profilers_run_together_and_change_no_number(pool, tmp_path):
    profilers = {"trace": Trace(skip=2, steps=1), "memory": Memory(skip=2, steps=2, every=0)}
    losses = []
    for name, given in {"off": {}, "both": {"profiler": both(**profilers)}}.items():
        made = tiny.recipe(tmp_path, name=name, steps=5, pipeline=2, microbatch=3, **given)
        run = tiny.begin(made)
        pool.run(2, trained_as_written, to_mapping(made), run)
        losses.append([row[meter.LOSS] for row in run.metrics("train")])
    assert losses[0] == losses[1]
    assert len(run.metrics("operators")) == len(run.metrics("memory")) == 1
    # The layers of both stages, in the order of the model.
    (table,) = run.traces.glob("*.layers.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["layer"] for row in rows] == ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    peak = max(value for key, value in run.metrics("memory")[0].items() if key.endswith("(GiB)"))
    for row in rows:
        assert 0 < float(row["forward_gib"]) <= peak + 1e-6
        assert 0 < float(row["backward_gib"]) <= peak + 1e-6
    assert "memory by layer up to step 4, most in: " in (run.logs / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (
            {"trace": Trace(), "breakdown": Breakdown()},
            r"\[trace,breakdown\]: trace and breakdown both record with torch",
        ),
        (
            {"trace": Trace(), "mine": Trace()},
            r"\[trace,mine\]: has two profilers of kind trace; leave one of them out",
        ),
        ({"off": NoProfiling(), "memory": Memory()}, r"\[off,memory\]: off is not a profiler; leave it out"),
    ],
)
def test_what_cannot_run_together_is_one_line(tmp_path, parts, line):
    with pytest.raises(ConfigError, match=rf"^profiler={line}"):
        tiny.recipe(tmp_path, profiler=both(**parts))


class Held(torch.autograd.Function):
    """Identity that holds some bytes from its forward to the end of its backward."""

    @staticmethod
    def forward(ctx, inputs, held, used):
        ctx.held, ctx.used = held, used
        used[0] += held
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.used[0] -= ctx.held
        return gradient, None, None


class Keeps(torch.nn.Module):
    def __init__(self, held, used):
        super().__init__()
        self.held, self.used = held, used

    def forward(self, inputs):
        return Held.apply(inputs, self.held, self.used)


def test_a_layers_peak_is_that_of_its_own_passes():
    used = [0]
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": Keeps(2**30, used), "1": Keeps(3 * 2**30, used)})
    model.head = Keeps(2**29, used)
    sampler = _Sampler(lambda: used[0], layers_of(model))
    inputs = torch.ones(1, requires_grad=True)
    with sampler.phase("forward"):
        outputs = model.head(model.layers["1"](model.layers["0"](inputs)))
    with sampler.phase("backward"):
        outputs.sum().backward()
    peaks = sampler.close()
    assert {name: peaks[name] for name in peaks if " " in name} == {
        "layers.0 forward": 1.0,
        "layers.1 forward": 4.0,
        "head forward": 4.5,
        "head backward": 4.5,
        "layers.1 backward": 4.0,
        "layers.0 backward": 1.0,
    }
    # Outside of a window layers have no hooks.
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


STEP = "breakdown/step(s)"
LAYOUTS = {
    "FSDP and tensor": (4, {"shard": 2, "tensor": 2}, {"shard", "tensor"}),
    "context": (2, {"context": 2}, {"context"}),
    "pipeline": (2, {"pipeline": 2, "microbatch": 3}, {"pipeline"}),
}
# The pipeline shows each kind of event.
SLOWER = ("context", "FSDP and tensor")


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


# Parts of a step from traces made by hand


AXES = {"7": "shard", "8": "tensor"}


def event(name, begin, end, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "cat": cat, "tid": tid, "pid": 1, "args": args}


def phase(name, begin, end):
    return event(f"titanlab.phase:{name}", begin, end, "user_annotation")


def step(begin, end, number=3):
    return event(f"ProfilerStep#{number}", begin, end, "user_annotation")


def kernel(name, begin, end, launch, cat="kernel", **args):
    number = f"{begin}-{name}"
    launched = event("cudaLaunchKernel", launch, launch + 1, "cuda_runtime", tid=2, correlation=number)
    return [launched, event(name, begin, end, cat, tid=7, correlation=number, **args)]


def microseconds(parts):
    return {name: round(1e6 * seconds) for name, seconds in parts.items() if seconds}


def test_on_a_gpu_communication_counts_where_nothing_computes():
    events = [
        step(0, 1000),
        event("ProfilerStep#3", 0, 1000, "gpu_user_annotation", tid=7),
        phase("data", 0, 40),
        phase("forward", 40, 100),
        phase("backward", 100, 200),
        event("titanlab.phase:forward", 100, 300, "gpu_user_annotation", tid=7),
        phase("optimizer", 200, 220),
        *kernel("gemm", 100, 300, launch=50),
        # Beside the product for 50 µs, alone for 100 µs.
        *kernel("ncclDevKernel_AllGather_RING_LL", 250, 400, launch=60, **{"Process Group Name": "7"}),
        # The host is at the optimizer when this one runs; the backward has launched it, on a thread of autograd.
        *kernel("gemm_backward", 400, 700, launch=150),
        *kernel("ncclDevKernel_ReduceScatter", 650, 750, launch=160, **{"Process Group Name": "8"}),
        # Two streams compute at once: the time counts once.
        *kernel("gemm_backward", 500, 600, launch=151),
        *kernel("ncclKernel_AllReduce", 750, 760, launch=161, **{"Process Group Name": "of nobody"}),
        *kernel("adamw", 800, 900, launch=210),
        *kernel("Memcpy HtoD", 900, 910, launch=300, cat="gpu_memcpy"),
    ]
    assert microseconds(step_parts(events, AXES)) == {
        "step": 1000,
        "data": 40,
        "forward": 200,
        "exposed_shard": 100,
        "backward": 300,
        "exposed_tensor": 50,
        "exposed_other_group": 10,
        "optimizer": 100,
        # Nothing runs from 40 to 100, from 760 to 800 and from 910 on; a copy that no phase has launched.
        "other": 60 + 40 + 90 + 10,
    }


def test_on_a_cpu_communication_counts_where_the_main_thread_runs_no_operation():
    events = [
        step(0, 1000),
        phase("forward", 100, 400),
        event("titanlab.issue:shard:all_gather", 110, 110, "user_annotation"),
        event("c10d::_allgather_base_", 111, 120),
        event("gloo:all_gather", 115, 300, "user_annotation", tid=9),
        # An operation of gloo's own thread is not compute of this rank.
        event("aten::view", 116, 290, tid=9),
        event("aten::mm", 200, 350),
        phase("backward", 400, 900),
        # Around Python code that waits.
        event("autograd::engine::evaluate_function: MmBackward0", 400, 900),
        event("MmBackward0", 410, 890),
        event("titanlab.issue:tensor:reduce_scatter", 500, 500, "user_annotation"),
        event("gloo:all_reduce", 510, 600, "user_annotation", tid=9),
        event("titanlab.issue:shard:all_reduce", 590, 590, "user_annotation"),
        event("gloo:all_reduce", 590, 640, "user_annotation", tid=10),
        # A message on its way is not a wait: the wait has its own phase.
        event("gloo:recv", 640, 900, "user_annotation"),
        phase("exposed_pipeline", 700, 800),
        phase("checkpoint", 900, 950),
    ]
    assert microseconds(step_parts(events, {})) == {
        "step": 1000,
        "forward": 300 - 85,
        "exposed_shard": 85 + 40,
        "exposed_tensor": 90,
        "exposed_pipeline": 100,
        "backward": 500 - 90 - 40 - 100,
        "checkpoint": 50,
        "other": 150,
    }


def test_a_collective_without_a_mark_belongs_to_no_axis():
    events = [step(0, 100), event("gloo:all_reduce", 10, 30, "user_annotation", tid=9)]
    assert microseconds(step_parts(events, {})) == {"step": 100, "exposed_other_group": 20, "other": 80}


def test_the_parts_are_the_mean_of_steps_and_of_ranks():
    events = [step(0, 100), step(100, 400, 4), phase("forward", 50, 200), phase("forward", 390, 500)]
    assert microseconds(step_parts(events, {})) == {"step": 200, "forward": 80, "other": 120}
    assert mean([{"step": 4.0, "data": 4.0}, {"step": 2.0, "other": 2.0}]) == {"step": 3.0, "data": 2.0, "other": 1.0}
    assert step_parts([phase("forward", 0, 1)], {}) == {}


def test_the_line_has_the_largest_part_first():
    parts = {"step": 0.2, "data": 0.00005, "forward": 0.05, "exposed_shard": 0.15}
    assert line(parts) == "200 ms: exposed shard 75.0%, forward 25.0%"


@pytest.mark.parametrize("seed", range(3))
def test_parts_add_up_whatever_the_trace(seed):
    import random

    draw = random.Random(seed)
    events = [step(0, 1000)]
    for _ in range(60):
        begin = draw.randrange(-50, 1000)
        end = begin + draw.randrange(0, 200)
        kind = draw.randrange(4)
        if kind == 0:
            events.append(phase(draw.choice(["data", "forward", "backward", "checkpoint"]), begin, end))
        elif kind == 1:
            events += kernel(draw.choice(["gemm", "adamw"]), begin, end, launch=draw.randrange(1000))
        elif kind == 2:
            group = {"Process Group Name": draw.choice(["7", "8", "9"])}
            events += kernel("ncclDevKernel_AllGather", begin, end, launch=0, **group)
    parts = step_parts(events, AXES)
    assert sum(seconds for name, seconds in parts.items() if name != "step") == pytest.approx(parts["step"])

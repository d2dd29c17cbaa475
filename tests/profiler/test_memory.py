"""Memory by phase, snapshots, and what memory holds when it is used up."""

import re

import pytest
import torch
from torch import nn

from tests import tiny
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.profiler.consumers import consumers, described, failing_module, living, named_consumers
from titanlab.profiler.contract import Links
from titanlab.profiler.memory import RANK, MemoryProfiler, largest, metric, resident_bytes
from titanlab.profiler.memory_schema import Memory
from titanlab.profiler.step_parts import PHASES
from titanlab.records.outcome import OutcomeKind, from_exception
from titanlab.training.train import Observer

HOG = 256 * 2**20


class Hog(Observer):
    """Takes memory in the second step's forward, and frees it there."""

    def with_gradients(self, step, model):
        model.register_forward_pre_hook(lambda module, given: torch.ones(HOG // 4).sum() and None)


def trained(made, run, observer):
    return tiny.as_rank(made, run, observer).kind


@pytest.mark.full
def test_the_peak_of_a_phase_is_counted_for_it(pool, tmp_path):
    losses = []
    for name, given in {"off": {}, "memory": {"profiler": Memory(skip=1, steps=2, every=3)}}.items():
        made = tiny.recipe(tmp_path, name=name, steps=6, shard=2, every=2, **given)
        run = tiny.begin(made)
        pool.run(2, trained, made, run, Hog())
        losses.append([row[meter.LOSS] for row in run.metrics("train")])
    assert losses[0] == losses[1]
    rows = run.metrics("memory")
    assert [row["step"] for row in rows] == [3, 6]
    for phase in PHASES:
        assert rows[0][metric(phase)] > 0.05
    assert rows[0][metric("forward")] > rows[0][metric("data")] + 0.8 * HOG / 2**30
    assert rows[0][RANK] in (0, 1)
    assert "memory up to step 3, largest of the ranks: data" in (run.logs / "rank-0.log").read_text()


def test_the_largest_of_the_ranks_is_named():
    rows = [dict.fromkeys(PHASES, 1.0), {**dict.fromkeys(PHASES, 0.5), "backward": 3.0}]
    assert largest(rows) == {**{metric(name): 1.0 for name in PHASES}, metric("backward"): 3.0, RANK: 1}
    assert 2**20 < resident_bytes() < 2**40


def test_on_a_gpu_snapshots_are_written_on_a_schedule_and_at_out_of_memory(tmp_path, monkeypatch):
    recorded, observers, reported = [], [], []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **given: recorded.append(given))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: open(path, "wb").close())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30 * device)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    profiler = MemoryProfiler(Memory(skip=1, steps=2, every=4, entries=7))
    profiler.connect(
        Links(
            axes={},
            marks_collectives=lambda: pytest.fail("memory has no collectives"),
            gather=lambda value: [value],
            report=lambda kind, step, row, lines: reported.append((kind, step, row[metric("forward")])),
            failed=lambda what, reason: pytest.fail(f"{what}: {reason}"),
        )
    )
    profiler.start(tmp_path, rank=1, attempt=2, on_gpu=True)
    for step in range(11, 19):
        with profiler.phase("forward"):
            pass
        profiler.after_step(step)
    observers[0](0, 1, 2, 3)
    profiler.close()
    assert recorded == [{"max_entries": 7, "stacks": "python"}, {"enabled": None}]
    assert reported == [("memory", 13, 3.0), ("memory", 17, 3.0)]
    moments = ("out-of-memory", "step-13", "step-17")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"attempt-2-{moment}-rank-1.snapshot.pickle" for moment in moments
    ]


CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.2 GiB is free. "
    "Of the allocated memory 8.00 MiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"  # fmt: skip


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**18))

    def forward(self, error):
        raise error


@pytest.mark.parametrize(
    ("error", "begin", "end"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; this rank holds: activations and the rest 4 MiB"
            + ", optimizer state 2 MiB, parameters 1 MiB, gradients 1 MiB",
            "; in the forward of 1",
        ),
        (RuntimeError(CPU), "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator", "; in the forward of 1"),
    ],
)  # fmt: skip
def test_the_cause_names_what_the_memory_holds(error, begin, end):
    model = nn.Sequential(nn.Identity(), Fails())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    original = str(error)
    with pytest.raises(type(error)) as caught, named_consumers(model, optimizer):
        model(error)
    outcome = from_exception(caught.value)
    assert outcome.kind is OutcomeKind.OOM
    assert outcome.cause.startswith(begin)
    assert outcome.cause.endswith(end)
    assert original in str(caught.value)


def test_consumers_and_modules_of_other_errors():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    assert consumers(model, optimizer) == {"parameters": 64, "gradients": 0, "optimizer state": 0}
    assert failing_module(ValueError(), model) == ""
    assert described(MemoryError(), model, optimizer).startswith("out of memory; this rank holds: activations")
    with pytest.raises(ValueError, match=r"^unchanged$"), named_consumers(model, optimizer):
        raise ValueError("unchanged")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"skip": 0}, r"profiler\.skip=0: must be at least 1; try 5"),
        ({"steps": 0}, r"profiler\.steps=0: must be at least 1; try 3"),
        ({"entries": 0}, r"profiler\.entries=0: must be at least 1; try 100000"),
        ({"every": 3}, r"profiler\.every=3: must be 0, or larger than the 3 steps of a window; try 300"),
    ],
)
def test_rules(given, line):
    with pytest.raises(ConfigError, match=line):
        Memory(**given)


def test_living_tensors_are_told_apart_and_counted_once():
    before = living()
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    others = [torch.zeros(1 << 10), model.weight.data.view(-1), torch.empty(1 << 30, device="meta")]
    found = {name: size - before[name] for name, size in living().items()}
    weight = 256 * 256 * 4
    # The optimizer's count of steps has four bytes.
    assert found == {
        "parameters": weight,
        "gradients": weight,
        "optimizer state": 2 * weight + 4,
        "other tensors": 4096,
    }
    del others


@pytest.mark.parametrize("when", ["build", "load"])
def test_before_the_first_step_the_cause_names_what_the_memory_holds(tmp_path, monkeypatch, when):
    made = tiny.recipe(tmp_path, steps=2)
    run = tiny.begin(made)

    def fails(*given, **named):
        raise torch.OutOfMemoryError(CUDA.replace("8.00 MiB", "8.00 GiB"))

    if when == "build":
        monkeypatch.setattr(type(made.optimizer.implementation()), "build", fails)
    else:
        monkeypatch.setattr("titanlab.training.train.load_start", fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tiny.as_rank(made, run)
    cause = from_exception(caught.value).cause
    start = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; before its first step this rank holds: "
    assert cause.startswith(start)
    # Other tests' tensors in this process count too.
    assert re.match(r"the rest (8|7\.9\d) GiB, ", cause.removeprefix(start))
    assert re.search(r"parameters [\d.]+ MiB", cause)

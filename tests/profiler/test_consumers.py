"""At out-of-memory: the first line of the error names what this rank's memory holds, and what was under way."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import tiny
from titanlab.costs import meter
from titanlab.records import OutcomeKind, from_exception
from titanlab.techniques.profiler.contract import Links
from titanlab.techniques.profiler.memory import RANK, MemoryProfiler, consumers, largest, metric, named_consumers
from titanlab.techniques.profiler.profilers_schema import Memory
from titanlab.techniques.profiler.trace import PHASES
from titanlab.train import Observer

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


def test_a_fake_tensor_of_the_compiler_holds_nothing():
    before = consumers()
    with FakeTensorMode():
        fake = nn.Linear(1024, 1024)
    assert isinstance(fake.weight, FakeTensor)
    assert consumers() == before


@pytest.mark.parametrize(
    ("error", "begin"),
    [
        (torch.OutOfMemoryError(CUDA), "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; this rank holds: "),
        (RuntimeError(CPU), "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator"),
        (RuntimeError("not enough memory: you tried"), "RuntimeError: not enough memory: you tried; this rank holds: "),
    ],
)  # fmt: skip
def test_the_cause_names_what_the_memory_holds(error, begin):
    model = nn.Sequential(nn.Identity(), Fails())
    original = str(error)
    with pytest.raises(type(error)) as caught, named_consumers():
        model(error)
    outcome = from_exception(caught.value)
    assert outcome.kind is OutcomeKind.OOM
    assert outcome.cause.startswith(begin)
    assert "activations and the rest " in outcome.cause
    assert outcome.cause.endswith("; in the forward of 1")
    assert original in str(caught.value)


def test_other_errors_and_errors_outside_of_a_model_are_told_apart():
    with pytest.raises(ValueError, match=r"^unchanged$"), named_consumers():
        raise ValueError("unchanged")
    with pytest.raises(MemoryError, match=r"^out of memory; this rank holds: [^;]*$"), named_consumers():
        raise MemoryError


def test_living_tensors_are_told_apart_and_counted_once():
    before = consumers()
    model = nn.Linear(256, 256, bias=False)
    model.on_meta, model.tied = nn.Linear(256, 256, device="meta"), model.weight
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    weight = 256 * 256 * 4
    # The optimizer's count of steps has four bytes.
    assert {name: size - before[name] for name, size in consumers().items()} == {
        "parameters": weight,
        "gradients": weight,
        "optimizer state": 2 * weight + 4,
    }


def of_cut_parameters():
    torch.distributed.init_process_group("gloo")
    before = consumers()["parameters"]
    model = fully_shard(nn.Linear(256, 256, bias=False), mesh=init_device_mesh("cpu", (2,)))
    assert type(model.weight) is DTensor
    return consumers()["parameters"] - before


def test_cut_parameters_are_counted(pool):
    assert pool.run(2, of_cut_parameters) == [128 * 256 * 4] * 2


def test_a_run_that_has_no_memory_left_says_what_holds_it(tmp_path, monkeypatch):
    made = tiny.recipe(tmp_path, steps=2)
    run = tiny.begin(made)

    def fails(*given, **named):
        raise torch.OutOfMemoryError(CUDA.replace("8.00 MiB", "8.00 GiB"))

    monkeypatch.setattr("titanlab.techniques.model.llama.FeedForward.forward", fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tiny.as_rank(made, run)
    cause = from_exception(caught.value).cause
    start = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; this rank holds: activations and the rest "
    )
    assert cause.startswith(start)
    # Other tests' tensors in this process count too.
    assert re.match(r"(8|7\.\d+) GiB, .*parameters [\d.]+ MiB", cause.removeprefix(start))
    assert cause.endswith("; in the forward of layers.0.feed_forward")


# Memory by phase and snapshots


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


def test_on_a_gpu_snapshots_are_written_on_a_schedule_and_at_out_of_memory(tmp_path, monkeypatch):
    recorded, observers, reported, failed = [], [], [], []
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
            failed=lambda what, reason: failed.append(what),
            model=torch.nn.Module(),
        )
    )
    profiler.start(tmp_path, rank=1, attempt=2, on_gpu=True)
    for step in range(11, 19):
        with profiler.phase("forward"):
            pass
        profiler.after_step(step)
    observers[0](0, 1, 2, 3)
    assert failed == []

    def full(path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    # A snapshot that cannot be written is told, leaves no part, and ends nothing.
    monkeypatch.setattr(memory, "_dump_snapshot", full)
    profiler.after_step(19)
    profiler._write_snapshot("step-20")
    profiler.close()
    assert failed == [str(tmp_path / "attempt-2-step-20-rank-1.snapshot.pickle")]
    assert recorded == [{"max_entries": 7, "stacks": "python"}, {"enabled": None}]
    assert reported == [("memory", 13, 3.0), ("memory", 17, 3.0)]
    moments = ("out-of-memory", "step-13", "step-17")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"attempt-2-{moment}-rank-1.snapshot.pickle" for moment in moments
    ]


def test_the_largest_of_the_ranks_is_named():
    rows = [dict.fromkeys(PHASES, 1.0), {**dict.fromkeys(PHASES, 0.5), "backward": 3.0}]
    assert largest(rows) == {**{metric(name): 1.0 for name in PHASES}, metric("backward"): 3.0, RANK: 1}

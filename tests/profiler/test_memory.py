"""Memory by phase, snapshots, and what memory holds when it is used up."""

import pytest
import torch

from tests import tiny
from titanlab.costs import meter
from titanlab.techniques.profiler.contract import Links
from titanlab.techniques.profiler.memory import RANK, MemoryProfiler, largest, metric
from titanlab.techniques.profiler.profilers_schema import Memory
from titanlab.techniques.profiler.trace import PHASES
from titanlab.train import Observer

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


def test_the_largest_of_the_ranks_is_named():
    rows = [dict.fromkeys(PHASES, 1.0), {**dict.fromkeys(PHASES, 0.5), "backward": 3.0}]
    assert largest(rows) == {**{metric(name): 1.0 for name in PHASES}, metric("backward"): 3.0, RANK: 1}

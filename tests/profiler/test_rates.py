"""Rates of a machine, measured by two processes on a CPU, and by CUDA's events where there are any."""

import pytest
import torch
from torch.nn import functional as F

from tests import tiny
from titanlab.plan import measured_cluster
from titanlab.techniques.profiler import profilers_schema as rates_schema
from titanlab.techniques.profiler import rates
from titanlab.techniques.profiler.contract import Links
from titanlab.techniques.profiler.profilers_schema import Rates
from titanlab.techniques.profiler.rates import RatesProfiler

SHORT = Rates(seconds=0.002, largest=64, megabytes=1)


def trained(made, run):
    return tiny.as_rank(made, run).kind


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tensors of which a copy takes microseconds."""
    monkeypatch.setattr(rates, "_COPIED", 2**12)


def test_a_run_measures_before_its_first_step(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=2, replicate=2, profiler=SHORT, saves="off")
    run = tiny.begin(made)
    pool.run(2, trained, made, run)
    (row,) = run.metrics(rates_schema.KIND)
    assert row["step"] == 0
    figures = {name: value for name, value in row.items() if name.startswith("rates/")}
    assert all(value > 0 for value in figures.values())
    collectives = {name.split()[3] for name in figures if name.startswith(rates_schema.COLLECTIVE)}
    assert collectives == {"all_reduce", "all_gather", "all_to_all"}
    sizes = {int(name.split()[4]) for name in figures if name.startswith(rates_schema.COLLECTIVE)}
    assert sizes == {2**10, 2**12, 2**14, 2**16, 2**18, 2**20}
    assert 2**20 < figures[rates_schema.PROCESS] < 2**40
    assert 1e-7 < figures[rates_schema.HOST] < 1e-2
    assert rates_schema.HOOK in figures
    found = measured_cluster(made, row)
    assert set(found.attention_tflops) == {"flash forward", "flash backward"}
    assert found.process_gb == figures[rates_schema.PROCESS] / 1e9
    assert "latency" in found.efficiencies


def linked(reported, others=()):
    return Links(
        axes={},
        marks_collectives=None,
        gather=lambda own: [own, *({**own, **other} for other in others)],
        report=lambda kind, step, metrics, lines: reported.append((kind, step, dict(metrics))),
        failed=lambda what, reason: pytest.fail(f"{what}: {reason}"),
        model=torch.nn.Module(),
    )


def test_the_slowest_rank_counts(tmp_path):
    reported = []
    slow = {rates_schema.COPY: 1.0, rates_schema.LAUNCH: 1e3, rates_schema.PROCESS: 1e15}
    fast = {rates_schema.COPY: 1e30, rates_schema.LAUNCH: 1e-30, rates_schema.PROCESS: 1.0}
    profiler = RatesProfiler(SHORT)
    profiler.connect(linked(reported, [slow, fast]))
    profiler.start(tmp_path, rank=0, attempt=1, on_gpu=False)
    profiler.after_step(1)
    profiler.close()
    ((kind, step, row),) = reported
    assert (kind, step) == (rates_schema.KIND, 0)
    assert {name: row[name] for name in slow} == slow
    assert not any(name.startswith(rates_schema.COLLECTIVE) for name in row)


def test_on_a_gpu_events_measure(monkeypatch, tmp_path):
    """The device is the CPU's memory under another name: what is tested is which clock is read."""

    class Event:
        made = 0

        def __init__(self, *, enable_timing):
            assert enable_timing
            Event.made += 1

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = torch.device("cuda", 0)
    assert rates.mean_seconds(lambda: None, 4, device) == 0.0005
    assert Event.made == 2


def test_attention_counts_half_of_the_square(monkeypatch):
    shapes = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *rest, **given: shapes.append(q.shape) or real(q, *rest, **given)
    )
    monkeypatch.setattr(rates, "mean_seconds", lambda call, count, device: call() is not None and 1.0)
    found = rates._of_device(SHORT, torch.device("cpu"))
    batch, heads, seq, width = shapes[0]
    flops = 2 * batch * heads * seq**2 * width
    assert found["rates/attention flash forward"] == flops
    assert found["rates/attention flash backward"] == 2.5 * flops
    # A CPU has no such kernel.
    assert not any("cudnn" in name for name in found)
    assert found["rates/product 64x64x64"] == 2 * 64**3

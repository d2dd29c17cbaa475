"""A step's one reduction: loss, norm, flags, and what gradients are multiplied by; memory and the peak of a rank."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch

from titanlab.costs import meter
from titanlab.distributed import World
from titanlab.recipe import Cluster
from titanlab.train import Reduction
from titanlab.train.totals import STOPS, memory, peak_flops, peak_memory_gib

CPU = torch.device("cpu")
ALONE = World(rank=0, world=1, local_rank=0, device=CPU)


class Peers:
    """A world in which every rank has the same, but for what is given for the others."""

    def __init__(self, *others):
        self.others = others

    def sum(self, values):
        return values + sum(torch.tensor(other, dtype=torch.float64) for other in self.others)


def reduction(world=ALONE, *, squared_norm=4.0, loss_sum=30.0, tokens=10, stop=0, nominal_tokens=10):
    return Reduction(
        world,
        squared_norm=torch.tensor(squared_norm, dtype=torch.float64),
        loss_sum=torch.tensor(loss_sum),
        tokens=tokens,
        stop=stop,
        nominal_tokens=nominal_tokens,
    )


def test_fewer_labels_correct_norm_and_gradients_alike():
    found = reduction(tokens=4, nominal_tokens=10)
    assert found.read().grad_norm == 5.0
    assert found.gradient_factor(None) == 2.5


@pytest.mark.parametrize(("max_norm", "factor"), [(3.0, None), (2.0, 1.0), (1.0, 0.5), (0.1, 0.05)])
def test_clipping(max_norm, factor):
    found = reduction().gradient_factor(max_norm)
    assert found is None if factor is None else found == pytest.approx(factor, rel=1e-6)


def test_clipping_and_correction_are_one_factor():
    # Gradients of norm 2 for 10 labels are of norm 5 for the 4 that count.
    assert reduction(tokens=4).gradient_factor(1.0) == pytest.approx(2.5 / 5, rel=1e-6)
    assert reduction(tokens=4).gradient_factor(100.0) == 2.5


@pytest.mark.parametrize("asks", [0, 1])
def test_one_rank_that_asks_for_a_checkpoint_is_enough(asks):
    world = Peers([0.0] * (3 + len(STOPS)) + [asks])
    given = {"squared_norm": torch.tensor(1.0), "loss_sum": torch.tensor(1.0), "tokens": 1, "stop": 0}
    assert Reduction(world, **given, nominal_tokens=1, saves=False).read().saves is bool(asks)


def test_a_zero_gradient_is_left_alone():
    assert reduction(squared_norm=0.0).gradient_factor(1.0) is None


@pytest.mark.parametrize(
    ("mine", "others", "stop"),
    [
        (0, {}, 0),
        (signal.SIGINT, {}, signal.SIGINT),
        (0, {signal.SIGTERM: 1}, signal.SIGTERM),
        (signal.SIGINT, {signal.SIGTERM: 1}, signal.SIGTERM),
        (signal.SIGTERM, {signal.SIGINT: 3}, signal.SIGTERM),
        (signal.SIGUSR2, {signal.SIGINT: 1, signal.SIGXCPU: 1}, signal.SIGXCPU),
    ],
)
def test_a_stop_of_any_rank_is_known_to_all(mine, others, stop):
    found = reduction(Peers([0.0, 0.0, 0.0, *(others.get(number, 0) for number in STOPS)]), stop=mine).read()
    assert found.stop == stop


def test_a_step_without_labels_is_not_finite():
    assert not reduction(tokens=0, loss_sum=0.0).read().finite


def test_memory_is_of_the_process_or_of_a_gpu_s_allocator(monkeypatch):
    ((name, gib),) = memory(CPU).items()
    assert name == "memory/max_resident(GiB)"
    assert 0.01 < gib < 100
    peaks = {"active_bytes.all.peak": 20 * 2**30, "reserved_bytes.all.peak": 40 * 2**30}
    stats = {**peaks, "active_bytes.all.current": 1, "num_alloc_retries": 3, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: stats["reserved_bytes.all.peak"])
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties, raising=False)
    assert memory(torch.device("cuda")) == {
        meter.MEMORY_ACTIVE: 20.0,
        "memory/max_active(%)": 25.0,
        meter.MEMORY_RESERVED: 40.0,
        "memory/max_reserved(%)": 50.0,
        "memory/num_alloc_retries": 3,
        "memory/num_ooms": 1,
    }
    assert peak_memory_gib(torch.device("cuda")) == 40.0


def test_waiting_for_a_core_does_not_lower_the_peak_of_a_cpu(monkeypatch):
    """A run's own ranks are on the cores while it is measured; each sweep's row had a peak of its own."""
    multiply, waited = torch.mm, 0.02

    def delayed(a, b):
        time.sleep(waited)
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", delayed)
    peak, source = peak_flops(Cluster(accelerator="cpu"), CPU, torch.float32)
    assert peak > 1.5 * 2 * 512**3 / waited
    assert source == "512³ matmul measured on this CPU"

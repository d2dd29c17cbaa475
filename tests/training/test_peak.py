"""The peak of a CPU: a short measurement, which other processes must not spoil."""

import time

import torch

from titanlab.recipe import Cluster
from titanlab.train.totals import peak_flops


def test_waiting_for_a_core_does_not_lower_the_peak_of_a_cpu(monkeypatch):
    """A run's own ranks are on the cores while it is measured; each sweep's row had a peak of its own."""
    multiply, waited = torch.mm, 0.02

    def delayed(a, b):
        time.sleep(waited)
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", delayed)
    peak, source = peak_flops(Cluster(accelerator="cpu"), torch.device("cpu"), torch.float32)
    assert peak > 1.5 * 2 * 512**3 / waited
    assert source == "512³ matmul measured on this CPU"

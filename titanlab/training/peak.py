"""The peak of a device: what the MFU is a share of."""

from __future__ import annotations

import time

import torch

from titanlab.cluster.schema import Cluster
from titanlab.costs import hardware

_MATMUL_SIZE = 512
_MATMUL_SECONDS = 0.05


def peak_flops(cluster: Cluster, device: torch.device, compute: torch.dtype) -> tuple[float | None, str]:
    """FLOP/s of one device in the given dtype, and where the figure comes from.

    The recipe's own figure wins, then the datasheet's. A CPU has none: there a short matrix product is
    timed, and the figure says so. None for an accelerator that is not in the table.
    """
    if cluster.peak_tflops is not None:
        return cluster.peak_tflops * 1e12, "cluster.peak_tflops"
    if device.type == "cpu":
        return _measured(compute), f"{_MATMUL_SIZE}³ matmul measured on this CPU"
    return hardware.peak_flops(str(cluster.device), str(compute).removeprefix("torch.")), f"{cluster.device}, dense"


def _measured(dtype: torch.dtype) -> float:
    """Best of several products of two square matrices, with the threads that the run has.

    By this thread's processor time: it has a part in each product, and does not get longer where other processes, such
    as the run's other ranks, share the cores.
    """
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    best = float("inf")
    end = time.thread_time() + _MATMUL_SECONDS
    while time.thread_time() < end or best == float("inf"):
        start = time.thread_time()
        torch.mm(a, a)
        best = min(best, time.thread_time() - start)
    flops: float = 2 * _MATMUL_SIZE**3 / best
    return flops

"""The peak FLOP/s of a device, the reference of the MFU."""

from __future__ import annotations

import time

import torch

from titanlab.cluster.schema import Cluster
from titanlab.costs import hardware

_MATMUL_SIZE = 512
_MATMUL_SECONDS = 0.05


def peak_flops(cluster: Cluster, device: torch.device, compute: torch.dtype) -> tuple[float | None, str]:
    """Peak FLOP/s of one device in the given dtype, and the source of the figure.

    The recipe's figure comes first, then the datasheet's. On CPU a short matrix product is timed instead. None for
    an accelerator that is not in the table.
    """
    if cluster.peak_tflops is not None:
        return cluster.peak_tflops * 1e12, "cluster.peak_tflops"
    if device.type == "cpu":
        return _measured(compute), f"{_MATMUL_SIZE}³ matmul measured on this CPU"
    return hardware.peak_flops(str(cluster.device), str(compute).removeprefix("torch.")), f"{cluster.device}, dense"


def _measured(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products of square matrices, with the run's number of threads.

    It measures the CPU time of this thread, which takes part in each product: unlike wall time it does not grow when
    other processes, such as the run's other ranks, share the cores.
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

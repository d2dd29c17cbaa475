"""Datasheet figures of devices: dense peaks, memory, links.

Peaks are those of dense matrix products, half of what datasheets print "with sparsity". Every figure has a
source, and an unknown device has no peak: no MFU is better than an MFU against a wrong peak.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TABLES = "stas00/ml-engineering, compute/accelerator and network"
_TORCHTITAN = "torchtitan, get_peak_flops"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, or one die of a device that torch shows as several.

    Attributes:
        name: for display.
        words: words that its name in torch (`torch.cuda.get_device_name`) contains.
        also: words that its name may contain too; any other word means another device.
        peak_tflops: dense TFLOP/s by torch's name of the dtype, and by `tf32`.
        memory_gb: as in the datasheet, in 10⁹ or 2³⁰ bytes; a device reports a little less.
        memory_gb_per_second: bandwidth of that memory.
        link_gb_per_second: to the other devices of its node, in one direction.
        product_tflops: largest rate of a matrix product that was measured (MAMF), by dtype; empty: not measured.
        source: source of the figures.
    """

    name: str
    words: tuple[str, ...]
    also: tuple[str, ...] = ()
    peak_tflops: Mapping[str, float]
    memory_gb: float | None = None
    memory_gb_per_second: float | None = None
    link_gb_per_second: float | None = None
    product_tflops: Mapping[str, float] = field(default_factory=dict)
    source: str


def _peaks(bf16: float, *, fp8: float | None, tf32: float | None, fp32: float | None) -> dict[str, float]:
    """Peaks of a device whose two half precisions are equally fast, as in every row of the table."""
    rates = {"bfloat16": bf16, "float16": bf16, "float8_e4m3fn": fp8, "float8_e5m2": fp8, "tf32": tf32, "float32": fp32}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_A100 = _peaks(312, fp8=None, tf32=156, fp32=19.5)
# The largest rates over shapes of products that were measured; an H200 computes as an H100.
_A100_PRODUCTS = {"bfloat16": 271.2}
_H100_PRODUCTS = {"bfloat16": 794.5, "float8_e4m3fn": 1402.6}
_H200_PRODUCTS = {"bfloat16": 794.5, "float8_e4m3fn": 1453.4}
_B200_PRODUCTS = {"bfloat16": 1745.0, "float8_e4m3fn": 3432.5}
_HOPPER_SXM = _peaks(989, fp8=1979, tf32=494.5, fp32=67)

DEVICES = (
    Device(
        name="A100 SXM 80 GB",
        words=("A100", "80GB"),
        also=("SXM", "SXM4"),
        peak_tflops=_A100,
        memory_gb=80,
        memory_gb_per_second=2000,
        link_gb_per_second=300,
        product_tflops=_A100_PRODUCTS,
        source=_TABLES,
    ),
    Device(
        name="A100 SXM 40 GB",
        words=("A100", "40GB"),
        also=("SXM", "SXM4"),
        peak_tflops=_A100,
        memory_gb=40,
        memory_gb_per_second=1600,
        link_gb_per_second=300,
        product_tflops=_A100_PRODUCTS,
        source=_TABLES,
    ),
    Device(
        name="A100 PCIe",
        words=("A100", "PCIE"),
        also=("40GB", "80GB"),
        # It has the SXM module's peak in bfloat16; the sources have no other figure for it.
        peak_tflops={"bfloat16": 312},
        source=_TORCHTITAN,
    ),
    Device(
        name="H100 SXM",
        words=("H100", "80GB", "HBM3"),
        peak_tflops=_HOPPER_SXM,
        memory_gb=80,
        memory_gb_per_second=3350,
        link_gb_per_second=450,
        product_tflops=_H100_PRODUCTS,
        source=_TABLES,
    ),
    Device(
        name="H100 96 GB HBM2e",
        # Its name differs from the other H100 names only by the words that it does not have.
        words=("H100",),
        peak_tflops=_HOPPER_SXM,
        memory_gb=96,
        memory_gb_per_second=2400,
        link_gb_per_second=450,
        product_tflops=_H100_PRODUCTS,
        source=f"torchtitan benchmarks/llama3_h100_202412; {_TORCHTITAN}",
    ),
    Device(
        name="H100 PCIe",
        words=("H100", "PCIE"),
        also=("80GB",),
        peak_tflops=_peaks(756, fp8=1513, tf32=378, fp32=51),
        memory_gb=80,
        memory_gb_per_second=2000,
        source=_TABLES,
    ),
    Device(
        name="H100 NVL",
        words=("H100", "NVL"),
        peak_tflops={"bfloat16": 835},
        memory_gb=94,
        memory_gb_per_second=3900,
        source=f"{_TORCHTITAN}; memory: {_TABLES}",
    ),
    Device(
        name="H200 SXM",
        words=("H200",),
        peak_tflops=_HOPPER_SXM,
        memory_gb=141,
        memory_gb_per_second=4800,
        link_gb_per_second=450,
        product_tflops=_H200_PRODUCTS,
        source=_TABLES,
    ),
    Device(
        name="B200",
        words=("B200",),
        peak_tflops=_peaks(2250, fp8=4500, tf32=1125, fp32=None),
        memory_gb=180,
        memory_gb_per_second=8000,
        link_gb_per_second=900,
        product_tflops=_B200_PRODUCTS,
        source=_TABLES,
    ),
    Device(
        name="GB200",
        words=("GB200",),
        peak_tflops=_peaks(2500, fp8=5000, tf32=1250, fp32=None),
        memory_gb=186,
        memory_gb_per_second=8000,
        link_gb_per_second=900,
        product_tflops={"bfloat16": 1822.0},
        source=f"{_TABLES}; memory: NVIDIA, GB200 NVL72, 13.4 TB and 576 TB/s of 72",
    ),
    Device(
        name="L40S",
        words=("L40S",),
        peak_tflops=_peaks(362, fp8=733, tf32=183, fp32=91.6),
        memory_gb=48,
        memory_gb_per_second=860,
        source=_TABLES,
    ),
    Device(
        name="MI300X",
        words=("MI300X",),
        also=("INSTINCT", "OAM"),
        # No fp8: its float8 formats (…fnuz) are not those of the table.
        peak_tflops=_peaks(1300, fp8=None, tf32=653.7, fp32=163.4),
        memory_gb=192,
        memory_gb_per_second=5300,
        source=_TABLES,
    ),
)
_VENDORS = frozenset({"NVIDIA", "AMD"})
# Compute capability → words of device names, also of devices without figures above. One word is enough, because slices
# and variants of a device have its capability. (NVIDIA, "CUDA GPU Compute Capability", developer.nvidia.com/cuda/gpus
# and its legacy page.)
_CAPABILITIES: Mapping[tuple[int, int], str] = {
    (6, 0): "P100",
    (7, 0): "V100",
    (7, 5): "T4",
    (8, 0): "A30 A100 A800",
    (8, 6): "A2 A10 A10G A16 A40 A4000 A5000 A6000 3060 3070 3080 3090",
    (8, 9): "L4 L20 L40 L40S 4060 4070 4080 4090",
    (9, 0): "H20 H100 H200 H800 GH200",
    (10, 0): "B200 GB200",
    (10, 3): "B300 GB300",
    (12, 0): "5060 5070 5080 5090",
}


def find(name: str) -> Device | None:
    """The device with this name in torch, such as `NVIDIA H100 80GB HBM3`; None if it is not in the table.

    All words of a name must match: `NVIDIA H200 NVL` is not an H200 SXM, and a slice of a device (`… MIG 1g.10gb`) is
    not that device.
    """
    words = set(re.findall(r"[A-Z0-9]+", name.upper())) - _VENDORS
    for device in DEVICES:
        if set(device.words) <= words <= {*device.words, *device.also}:
            return device
    return None


def peak_flops(name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s of the device with this name, for torch's name of a dtype; None if unknown."""
    device = find(name)
    if device is None or dtype not in device.peak_tflops:
        return None
    return device.peak_tflops[dtype] * 1e12


def compute_capability(name: str) -> tuple[int, int] | None:
    """NVIDIA's compute capability of the device with this name, such as (9, 0); None if it is not known."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    for capability, names in _CAPABILITIES.items():
        if words & set(names.split()):
            return capability
    return None

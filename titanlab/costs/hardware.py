"""Datasheet figures of devices: dense peaks, memory, links.

Peaks are those of dense matrix products, half of what datasheets print "with sparsity". Every figure has a
source. An unknown device has no peak, and its runs report no MFU: a wrong MFU would be worse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TABLES = "stas00/ml-engineering, compute/accelerator and network"
_TORCHTITAN = "torchtitan, get_peak_flops"


@dataclass(frozen=True)
class Device:
    """The figures of one device; or of one die, if torch shows a device's dies as separate devices.

    Attributes:
        words: words that its name in torch (`torch.cuda.get_device_name`) contains.
        also: words that the name may also contain; any other word means another device.
        memory_gb: memory as in the datasheet, in units of 10⁹ or 2³⁰ bytes; a device reports a little less.
        memory_gb_per_second: bandwidth of that memory.
        link_gb_per_second: bandwidth to the other devices of the node, in one direction.
        peak_tflops: dense TFLOP/s by torch's name of the dtype, and by `tf32`.
        product_tflops: rate that the matrix products of a training step sustain, by dtype; empty: not measured.
        watts: limit of its power; None: not known.
        product_watts: limit at which `product_tflops` were measured; None: `watts`.
    """

    name: str
    words: str
    also: str = ""
    memory_gb: float | None = None
    memory_gb_per_second: float | None = None
    link_gb_per_second: float | None = None
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    product_tflops: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    watts: float | None = None
    product_watts: float | None = None


def _peaks(bf16: float, *, fp8: float | None, tf32: float | None, fp32: float | None) -> dict[str, float]:
    """Peaks by dtype. On every device of the table bfloat16 and float16 are equally fast."""
    rates = {"bfloat16": bf16, "float16": bf16, "float8_e4m3fn": fp8, "float8_e5m2": fp8, "tf32": tf32, "float32": fp32}
    return {dtype: rate for dtype, rate in rates.items() if rate is not None}


_A100 = _peaks(312, fp8=None, tf32=156, fp32=19.5)
_HOPPER = _peaks(989, fp8=1979, tf32=494.5, fp32=67)
_H100_PCIE = _peaks(756, fp8=1513, tf32=378, fp32=51)
_B200 = _peaks(2250, fp8=4500, tf32=1125, fp32=None)
_GB200 = _peaks(2500, fp8=5000, tf32=1250, fp32=None)
_L40S = _peaks(362, fp8=733, tf32=183, fp32=91.6)
# No fp8 for MI300X: its float8 formats (…fnuz) are not the formats that this table names.
_MI300X = _peaks(1300, fp8=None, tf32=653.7, fp32=163.4)
# Hopper's rates are medians over the products of a step of Llama 3 8B on an H200 at its limit of 700 W, where its clock
# is 1.45 instead of 1.98 GHz (benchmarks/results/gpu_session_h200). An H100 counts like an H200. The medians are 0.85
# of MAMF, the largest rate over all shapes. Of Blackwell only MAMF is known (1,745, 3,432.5 and 1,822 TFLOP/s): its
# rates are MAMF scaled down. The A100's rate is its MAMF, 0.87 of its peak: its power limit hardly lowers its clock.
_A100_PRODUCTS = {"bfloat16": 271.2}
_HOPPER_PRODUCTS = {"bfloat16": 673.7, "float8_e4m3fn": 1200.0}
_B200_PRODUCTS = {"bfloat16": 1480.0, "float8_e4m3fn": 2834.0}
_GB200_PRODUCTS = {"bfloat16": 1545.0}
_HBM2E = f"torchtitan benchmarks/llama3_h100_202412; {_TORCHTITAN}"
_NVL72 = f"{_TABLES}; memory: NVIDIA, GB200 NVL72, 13.4 TB and 576 TB/s of 72"

DEVICES = (
    # Name, words, other words, memory and its bandwidth, link, peaks, measured products, source, watts.
    Device("A100 SXM 80 GB", "A100 80GB", "SXM SXM4", 80, 2000, 300, _A100, _A100_PRODUCTS, _TABLES, 400),
    Device("A100 SXM 40 GB", "A100 40GB", "SXM SXM4", 40, 1600, 300, _A100, _A100_PRODUCTS, _TABLES, 400),
    # The A100 PCIe has the SXM module's peak in bfloat16; the sources have no other figure of it.
    Device("A100 PCIe", "A100 PCIE", "40GB 80GB", None, None, None, {"bfloat16": 312}, {}, _TORCHTITAN, 300),
    Device("H100 SXM", "H100 80GB HBM3", "", 80, 3350, 450, _HOPPER, _HOPPER_PRODUCTS, _TABLES, 700),
    # Torch names this device `H100` only; the names of other H100 have more words.
    Device("H100 96 GB HBM2e", "H100", "", 96, 2400, 450, _HOPPER, _HOPPER_PRODUCTS, _HBM2E, 500, 700),
    Device("H100 PCIe", "H100 PCIE", "80GB", 80, 2000, None, _H100_PCIE, {}, _TABLES, 350),
    Device("H100 NVL", "H100 NVL", "", 94, 3900, None, {"bfloat16": 835}, {}, f"{_TORCHTITAN}; memory: {_TABLES}", 400),
    Device("H200 SXM", "H200", "", 141, 4800, 450, _HOPPER, _HOPPER_PRODUCTS, _TABLES, 700),
    Device("B200", "B200", "", 180, 8000, 900, _B200, _B200_PRODUCTS, _TABLES, 1000),
    Device("GB200", "GB200", "", 186, 8000, 900, _GB200, _GB200_PRODUCTS, _NVL72, 1200),
    Device("L40S", "L40S", "", 48, 860, None, _L40S, {}, _TABLES, 350),
    Device("MI300X", "MI300X", "INSTINCT OAM", 192, 5300, None, _MI300X, {}, _TABLES, 750),
)
_VENDORS = frozenset({"NVIDIA", "AMD"})
# Compute capability → words of device names, also of devices without figures above. A name needs only one of the words,
# because slices and variants of a device have the device's capability. (NVIDIA, "CUDA GPU Compute Capability",
# developer.nvidia.com/cuda/gpus and its legacy page.)
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


def find_device(name: str) -> Device | None:
    """The device with this name in torch, such as `NVIDIA H100 80GB HBM3`; None if it is not in the table.

    All words of a name must match: `NVIDIA H200 NVL` is not an H200 SXM, and a slice of a device (`… MIG 1g.10gb`) is
    not that device.
    """
    words = set(re.findall(r"[A-Z0-9]+", name.upper())) - _VENDORS
    for device in DEVICES:
        required = set(device.words.split())
        if required <= words <= required | set(device.also.split()):
            return device
    return None


# Power that does not depend on the clock: leakage, memory, fans. An H200 without work takes about 100 W.
_STATIC_WATTS = 100.0


def power_share(watts: float | None, measured: float | None) -> float:
    """The clock under the power limit `watts`, as a share of the clock under the limit `measured`.

    At the limit the dynamic power is c·V²·f, and the voltage V falls with the frequency f: f grows with the cube root
    of the power. If a limit is None, the limits count as equal: the share is 1.
    """
    if watts is None or measured is None or watts >= measured:
        return 1.0
    share: float = (max(watts - _STATIC_WATTS, 1.0) / (measured - _STATIC_WATTS)) ** (1 / 3)
    return share


def peak_flops(name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s of the device with this name, for torch's name of a dtype; None if unknown."""
    device = find_device(name)
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

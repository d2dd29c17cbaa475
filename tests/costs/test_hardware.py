"""Devices are found by their whole name, or not at all."""

import pytest

from titanlab.costs import compute_capability, find_device
from titanlab.costs.hardware import DEVICES, peak_flops


@pytest.mark.parametrize(
    ("name", "device", "bf16_tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", 312),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", 312),
        ("A100-SXM-80GB", "A100 SXM 80 GB", 312),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989),
        ("NVIDIA H100", "H100 96 GB HBM2e", 989),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA H100 NVL", "H100 NVL", 835),
        ("NVIDIA H200", "H200 SXM", 989),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA GB200", "GB200", 2500),
        ("NVIDIA L40S", "L40S", 362),
        ("AMD Instinct MI300X", "MI300X", 1300),
    ],
)
def test_known_names(name, device, bf16_tflops):
    found = find_device(name)
    assert found is not None
    assert found.name == device
    assert peak_flops(name, "bfloat16") == bf16_tflops * 1e12


# Cousins with other peaks, and parts of a device.
UNKNOWN = (
    *("", "cpu", "NVIDIA", "NVIDIA A10", "NVIDIA A10G", "NVIDIA A800-SXM4-80GB", "NVIDIA H20", "NVIDIA H800"),
    *("NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA L40", "NVIDIA L4", "AMD Instinct MI300A"),
    *("AMD Instinct MI325X", "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    *("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "GRID A100-10C"),
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names(name):
    assert find_device(name) is None
    assert peak_flops(name, "bfloat16") is None


def test_dtypes():
    h100 = "NVIDIA H100 80GB HBM3"
    assert peak_flops(h100, "float16") == 989e12
    assert peak_flops(h100, "float8_e4m3fn") == 1979e12
    assert peak_flops(h100, "float32") == 67e12
    assert peak_flops(h100, "tf32") == 494.5e12
    assert peak_flops(h100, "int8") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8_e4m3fn") is None


def test_figures_are_plausible_and_sourced():
    for device in DEVICES:
        assert find_device(device.words) is device
        assert device.source
        peaks = device.peak_tflops
        # Units: TFLOP/s, GB, GB/s, each within what such devices have had.
        assert 100 < peaks["bfloat16"] < 5000
        assert peaks.get("float8_e4m3fn", 2 * peaks["bfloat16"]) == pytest.approx(2 * peaks["bfloat16"], rel=0.02)
        assert peaks.get("tf32", peaks["bfloat16"] / 2) == pytest.approx(peaks["bfloat16"] / 2, rel=0.02)
        assert device.memory_gb is None or 40 <= device.memory_gb <= 200
        assert device.memory_gb_per_second is None or 800 <= device.memory_gb_per_second <= 8000
        assert device.link_gb_per_second is None or 300 <= device.link_gb_per_second <= 900


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB300", (10, 3)),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_compute_capabilities(name, capability):
    assert compute_capability(name) == capability

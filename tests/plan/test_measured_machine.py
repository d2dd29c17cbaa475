"""A cluster from measured rates: the estimates of its machine are what was measured."""

import dataclasses
import math

import pytest

from tests.plan.recipes import made
from titanlab.errors import ConfigError
from titanlab.plan import doubts, machine_of, measured_cluster, rate_lines
from titanlab.plan.machine import AxisPlacement, allocator_excess
from titanlab.recipe import Cluster

# Figures of a core, with collectives of 200 µs and 1 GB/s.
FIXED, BANDWIDTH = 200e-6, 1e9
ROW = {
    "kind": "rates",
    "step": 0,
    "rates/product 128x128x128": 30e9,
    "rates/product 256x256x256": 60e9,
    "rates/product 512x512x512": 80e9,
    "rates/product 1024x1024x1024": 100e9,
    "rates/product 1024x256x768": 90e9,
    "rates/attention": 20e9,
    "rates/copy": 8e9,
    "rates/pointwise": 10e9,
    "rates/launch(s)": 4e-6,
    "rates/process(B)": 0.4e9,
}
SIZES = [4**power for power in range(5, 13)]


def exchanges(group, ranks, fixed, bandwidth):
    """All-gathers whose time is that of a ring."""
    share = (ranks - 1) / ranks
    return {f"rates/collective {group} {ranks} all_gather {size}": fixed + size * share / bandwidth for size in SIZES}


def on_cpu(**given):
    return dataclasses.replace(made(), cluster=Cluster(accelerator="cpu", device="cpu", per_node=2, **given))


def machine(recipe, row):
    return machine_of(dataclasses.replace(recipe, cluster=measured_cluster(recipe, row)))


def test_a_cpu_reaches_what_was_measured():
    found = machine(on_cpu(), ROW | exchanges("node", 2, FIXED, BANDWIDTH))
    shares = found.efficiencies
    assert found.peak_flops["float32"] == pytest.approx(100e9)
    # The median of products that have the size of a model's.
    assert found.product_rate("float32") * shares.product == pytest.approx(90e9)
    assert found.attention_flops * shares.attention == pytest.approx(20e9)
    assert found.memory_bytes_per_second * shares.eager_memory == pytest.approx(10e9)
    assert found.memory_bytes_per_second * shares.fused_memory == pytest.approx(8e9)
    assert shares.launch_seconds == 4e-6
    assert (found.process_bytes, found.allocator_excess, found.notes) == (0.4e9, 1.0, ())
    axis = AxisPlacement(ranks=2, in_node=2, nodes=1)
    for size in SIZES:
        assert found.collective_seconds(axis, size / 2) == pytest.approx(FIXED + size / 2 / BANDWIDTH, rel=1e-3)


def test_one_process_measures_no_collective():
    found = measured_cluster(on_cpu(), ROW)
    assert "latency" not in found.efficiencies
    assert found.link_gb_per_second is None
    assert rate_lines(ROW)[-1] == "one process: no collective was measured"


@pytest.mark.parametrize("bandwidth", [math.inf, 1e13, -1e12], ids=["equal", "hardly growing", "shrinking"])
@pytest.mark.parametrize(("group", "name"), [("node", "link"), ("world", "network")])
def test_a_link_whose_times_do_not_grow_has_no_bandwidth_and_that_is_said(group, name, bandwidth):
    others = {"node": "world", "world": "node"}
    row = ROW | exchanges(group, 4, FIXED, bandwidth) | exchanges(others[group], 2, FIXED, BANDWIDTH)
    found = measured_cluster(on_cpu(), row)
    assert name not in found.efficiencies
    (line,) = doubts(row, found)
    assert line.startswith(f"no bandwidth of the {name}: ")
    row |= exchanges(group, 4, FIXED, BANDWIDTH)
    assert doubts(row, measured_cluster(on_cpu(), row)) == []
    assert doubts(ROW, measured_cluster(on_cpu(), ROW)) == []


def test_a_known_gpu_gets_shares_of_its_datasheet():
    recipe = made()
    row = {name: value for name, value in ROW.items() if name != "rates/process(B)"}
    row |= {"rates/product 1024x256x768": 600e12, "rates/product 1024x1024x1024": 600e12}
    row |= {"rates/product 512x512x512": 600e12, "rates/copy": 2.5e12, "rates/pointwise": 2e12}
    row |= exchanges("node", 8, 50e-6, 300e9) | exchanges("world", 16, 90e-6, 160e9)
    found = machine(recipe, row)
    assert found.peak_flops["bfloat16"] == 989e12
    assert found.product_rate("bfloat16") * found.efficiencies.product == pytest.approx(600e12)
    assert found.memory_bytes_per_second == 3350e9
    assert found.memory_bytes_per_second * found.efficiencies.fused_memory == pytest.approx(2.5e12)
    assert found.link_bytes_per_second * found.efficiencies.link == pytest.approx(300e9, rel=1e-3)
    # A ring over nodes uses the eight adapters of each.
    assert found.network_bytes_per_second * found.efficiencies.network * 8 == pytest.approx(160e9, rel=1e-3)
    assert found.allocator_excess == allocator_excess()


def test_a_device_in_no_table_is_what_was_measured():
    recipe = made(device="NVIDIA Unheard-of")
    with pytest.raises(ConfigError, match="nothing is known of its speed"):
        machine_of(recipe)
    row = ROW | {"rates/copy": 2e12, "rates/pointwise": 1e12, "rates/product 1024x1024x1024": 500e12}
    found = machine(recipe, row)
    assert found.name == "NVIDIA Unheard-of"
    assert found.product_rate("bfloat16") == pytest.approx(500e12)
    assert found.memory_bytes_per_second == 2e12


def test_the_lines_name_every_figure():
    row = ROW | exchanges("node", 2, FIXED, BANDWIDTH) | exchanges("world", 4, FIXED, BANDWIDTH)
    text = [line.split() for line in rate_lines(row)]
    assert ["product", "1024x256x768", "90.0", "GFLOP/s"] in text
    assert ["launch", "4.00", "µs"] in text
    assert ["process", "0.40", "GB"] in text
    assert ["µs,", "4", "ranks", "of", "several", "nodes", "all_gather"] in text
    assert text.count(["1", "KiB", "201"]) == 2
    # Ten figures, and two tables with a title and an empty line.
    assert len(text) == 10 + 2 * (2 + len(SIZES))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({name: value for name, value in ROW.items() if name != "rates/copy"}, "rates/copy: is missing"),
        ({**ROW, "rates/copy": 0.0}, "is no figure of rates/copy"),
        ({**ROW, "rates/copy": math.nan}, "is no figure of rates/copy"),
        ({**ROW, "rates/attention": None}, "is no figure of rates/attention"),
        ({**ROW, "rates/collective node two all_gather 4": 1.0}, "is no name of a collective"),
        ({}, "is missing in the measurement"),
    ],
)
def test_damaged_measurements(row, complaint):
    with pytest.raises(ConfigError, match=complaint):
        measured_cluster(on_cpu(), row)

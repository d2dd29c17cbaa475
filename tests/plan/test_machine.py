"""Machines: rates of datasheets, where the ranks of an axis lie, and the time of a collective."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml

from tests.plan.recipes import made
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.plan import machine_of
from titanlab.plan.machine import (
    FILE,
    LIMITS,
    AxisPlacement,
    Efficiencies,
    allocator_excess,
    axis_of,
    changed,
    file_text,
    fitted,
)
from titanlab.recipe import Cluster

CLUSTERS = Path(__file__).parents[2] / "conf" / "cluster"


def test_rates_are_those_of_the_datasheet():
    machine = machine_of(made(shard=8))
    assert machine.peak_flops["bfloat16"] == 989e12
    assert machine.product_rate("bfloat16") == 794.5e12
    assert machine.memory_bytes == 80e9
    assert machine.memory_bytes_per_second == 3350e9
    assert (machine.link_bytes_per_second, machine.network_bytes_per_second) == (450e9, 50e9)


def test_a_device_without_a_format_multiplies_in_bfloat16():
    machine = machine_of(made(device="NVIDIA A100-SXM4-80GB"))
    assert machine.product_rate("float8_e4m3fn") == machine.product_rate("bfloat16") == 271.2e12


def test_what_was_not_measured_is_said():
    assert machine_of(made()).notes == ()
    (note,) = machine_of(made(device="AMD Instinct MI300X")).notes
    assert note == "no rate of MI300X was measured: products are taken to reach 80% of its peak, as on an H100"


def test_a_given_peak_scales_the_rates():
    half = machine_of(made(cluster={"peak_tflops": 989 / 2}))
    assert half.product_rate("bfloat16") == pytest.approx(794.5e12 / 2)
    assert half.peak_flops["bfloat16"] == pytest.approx(989e12 / 2)


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.yaml") if path.stem != "local"))
def test_every_cluster_is_a_machine(name):
    values = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    values.pop("defaults")
    machine = machine_of(dataclasses.replace(made(), cluster=Cluster(**values)))
    rates = [machine.memory_bytes_per_second, machine.link_bytes_per_second, machine.network_bytes_per_second]
    assert all(0 < rate < math.inf for rate in rates)
    assert machine.product_rate("bfloat16") > 0
    assert machine.attention_flops > 0


def test_a_rack_is_one_node_for_its_links():
    values = yaml.safe_load((CLUSTERS / "gb200.yaml").read_text())
    values.pop("defaults")
    assert machine_of(dataclasses.replace(made(), cluster=Cluster(**values))).per_node == 72


@pytest.mark.parametrize("device", [None, "NVIDIA GeForce GTX 1080", "NVIDIA H100 PCIe"])
def test_an_unknown_device(device):
    recipe = made(cluster={"device": device})
    if device == "NVIDIA H100 PCIe":
        # It has no link of its own: it sends over the network inside a node too.
        assert machine_of(recipe).link_bytes_per_second == 50e9
        return
    with pytest.raises(ConfigError, match=r"cluster\.device"):
        machine_of(recipe)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("tensor", AxisPlacement(ranks=4, in_node=4, nodes=1)),
        ("context", AxisPlacement(ranks=4, in_node=2, nodes=2)),
        ("shard", AxisPlacement(ranks=2, in_node=1, nodes=2)),
        ("fsdp", AxisPlacement(ranks=8, in_node=2, nodes=4)),
        ("replicate", AxisPlacement(ranks=2, in_node=1, nodes=2)),
        ("world", AxisPlacement(ranks=64, in_node=8, nodes=8)),
    ],
)
def test_inner_axes_fill_nodes_first(name, axis):
    layout = Layout(pipeline=1, replicate=2, shard=2, context=4, tensor=4)
    assert axis_of(layout, name, per_node=8) == axis


def test_time_of_a_gather_by_hand():
    machine = dataclasses.replace(machine_of(made()), efficiencies=Efficiencies(link=0.5, network=0.25))
    inside = AxisPlacement(ranks=8, in_node=8, nodes=1)
    # 10 µs, 7 hops of 1.9 µs, and 7/8 of 1 GB at half of 450 GB/s.
    expected = 10e-6 + 7 * 1.9e-6 + 0.875e9 / 225e9
    assert machine.collective_seconds(inside, 0.875e9) == pytest.approx(expected, rel=1e-12)
    between = AxisPlacement(ranks=16, in_node=8, nodes=2)
    # One of 15 hops leaves the node. Eight adapters at a quarter of 50 GB/s are slower than the link.
    expected = 20e-6 + 14 * 1.9e-6 + 14e-6 + 1e9 / 100e9
    assert machine.collective_seconds(between, 1e9) == pytest.approx(expected, rel=1e-12)


def test_one_rank_sends_nothing():
    assert machine_of(made()).collective_seconds(AxisPlacement(ranks=1, in_node=1, nodes=1), 1e12) == 0.0


def test_efficiencies_of_a_cluster_replace_the_fitted_ones():
    machine = machine_of(made(cluster={"efficiencies": {"link": 0.123}}))
    assert machine.efficiencies == dataclasses.replace(fitted(), link=0.123)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"speed": 1.0}, "speed"),
        ({"link": 0.0}, "link"),
        ({"link": 1.01}, "link"),
        ({"link": math.nan}, "link"),
        ({"link": -1}, "link"),
        ({"overlap": 0.9}, "overlap"),
        ({"product": "fast"}, "product"),
        ({"launch_seconds": math.inf}, "launch_seconds"),
    ],
)
def test_wrong_efficiencies(values, key):
    with pytest.raises(ConfigError, match=rf"cluster\.efficiencies\.{key}"):
        changed(Efficiencies(), values)


def test_the_file_says_how_the_values_were_found():
    facts = json.loads(FILE.read_text())
    assert set(facts) == {
        "date", "runs", "median_error", "cross_validated_median_error", "allocator_excess", "efficiencies",
    }  # fmt: skip
    assert set(facts["efficiencies"]) == set(LIMITS)
    assert 1 <= allocator_excess() < 1.5


def test_what_is_written_is_read_again():
    text = file_text(Efficiencies(link=0.123456, stragglers=0.0), {"runs": 1})
    assert json.loads(text)["efficiencies"]["link"] == 0.1235
    assert json.loads(text)["runs"] == 1
    changed(Efficiencies(), json.loads(text)["efficiencies"])

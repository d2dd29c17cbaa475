"""Machines: rates of datasheets, efficiencies, where the ranks of an axis lie, and the time of a collective."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import yaml

from tests.plan.recipes import made
from titanlab.costs import Layout
from titanlab.costs.hardware import power_share
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
    fitted,
)
from titanlab.recipe import Cluster

CLUSTERS = Path(__file__).parents[2] / "conf" / "cluster"


def shipped(name):
    values = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    values.pop("defaults")
    return machine_of(dataclasses.replace(made(), cluster=Cluster(**values)))


def test_rates_are_those_of_the_datasheet():
    machine = machine_of(made(shard=8))
    assert machine.peak_flops["bfloat16"] == 989e12
    assert machine.product_rate("bfloat16") == 673.7e12
    assert (machine.memory_bytes, machine.memory_bytes_per_second) == (80e9, 3350e9)
    assert (machine.link_bytes_per_second, machine.network_bytes_per_second) == (450e9, 50e9)
    half = machine_of(made(cluster={"peak_tflops": 989 / 2}))
    assert half.product_rate("bfloat16") == pytest.approx(673.7e12 / 2)
    assert half.peak_flops["bfloat16"] == pytest.approx(989e12 / 2)
    # A device without a format multiplies in bfloat16; one without a link sends over the network inside a node too.
    a100 = machine_of(made(device="NVIDIA A100-SXM4-80GB"))
    assert a100.product_rate("float8_e4m3fn") == a100.product_rate("bfloat16") == 271.2e12
    assert machine_of(made(device="NVIDIA H100 PCIe")).link_bytes_per_second == 50e9
    with pytest.raises(ConfigError, match="has no bandwidth of memory in the table of devices"):
        machine_of(made(device="NVIDIA A100-PCIE-40GB"))


def test_a_limit_of_power_lowers_products_and_attention():
    """A clock grows with the cube root of the power beyond 100 W that do not depend on it."""
    whole, limited = machine_of(made()), machine_of(made(device="NVIDIA H100"))
    share = (400 / 600) ** (1 / 3)
    assert limited.product_rate("bfloat16") == pytest.approx(share * whole.product_rate("bfloat16"))
    assert limited.attention_flops["flash backward"] == pytest.approx(share * whole.attention_flops["flash backward"])
    assert power_share(800, 700) == power_share(None, 700) == 1.0


def test_attention_has_the_rate_of_the_kernel_that_the_trainer_chooses():
    hopper, ampere = machine_of(made()), machine_of(made(device="NVIDIA A100-SXM4-80GB"))
    shape = {"dtype": "bfloat16", "head_dim": 128, "seq_len": 8192}
    assert hopper.attention_kernel("auto", **shape) == "cudnn"
    assert ampere.attention_kernel("auto", **shape) == "flash"
    assert hopper.attention_kernel("efficient", **shape) == "efficient"
    assert hopper.attention_flops["cudnn forward"] == pytest.approx(551e12)
    # A kernel of another package counts as the slowest.
    slowest = hopper.flops_per_second("efficient backward")
    assert hopper.flops_per_second("unknown backward") == slowest < hopper.flops_per_second("flash backward")


def test_what_was_not_measured_is_said():
    assert machine_of(made()).notes == ()
    (note,) = machine_of(made(device="AMD Instinct MI300X")).notes
    assert note == "no rate of MI300X was measured: products are taken to reach 68% of its peak, as on an H200"
    (note,) = machine_of(made(cluster={"accelerator": "cpu", "device": "cpu"})).notes
    assert note.startswith("no rates of these CPUs were measured, times are rough")


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.yaml") if path.stem != "local"))
def test_every_cluster_is_a_machine(name):
    machine = shipped(name)
    rates = [machine.memory_bytes_per_second, machine.link_bytes_per_second, machine.network_bytes_per_second]
    rates += [machine.product_rate("bfloat16"), *machine.attention_flops.values()]
    assert all(0 < rate < math.inf for rate in rates)
    # A rack is one node for its links.
    assert machine.per_node == {"gb200": 72}.get(name, machine.per_node)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("tensor", AxisPlacement(ranks=4, in_node=4, nodes=1)),
        ("context", AxisPlacement(ranks=4, in_node=2, nodes=2)),
        ("shard", AxisPlacement(ranks=2, in_node=1, nodes=2)),
        ("fsdp", AxisPlacement(ranks=8, in_node=2, nodes=4)),
        ("replicate", AxisPlacement(ranks=2, in_node=1, nodes=2)),
        ("world", AxisPlacement(ranks=64, in_node=8, nodes=8)),
        ("expert", AxisPlacement(ranks=16, in_node=8, nodes=2)),
        ("expert_shard", AxisPlacement(ranks=2, in_node=1, nodes=2)),
    ],
)
def test_inner_axes_fill_nodes_first(name, axis):
    layout = Layout(pipeline=1, replicate=2, shard=2, context=4, tensor=4, expert=16)
    assert axis_of(layout, name, per_node=8) == axis


def test_time_of_a_collective_by_hand():
    machine = dataclasses.replace(machine_of(made()), efficiencies=Efficiencies(link=0.5, network=0.25))
    inside = AxisPlacement(ranks=8, in_node=8, nodes=1)
    # 10 µs, 7 hops of 1.9 µs, and 7/8 of 1 GB at half of 450 GB/s.
    expected = 10e-6 + 7 * 1.9e-6 + 0.875e9 / 225e9
    assert machine.collective_seconds(inside, 0.875e9) == pytest.approx(expected, rel=1e-12)
    between = AxisPlacement(ranks=16, in_node=8, nodes=2)
    # One of 15 hops leaves the node. Eight adapters at a quarter of 50 GB/s are slower than the link.
    expected = 20e-6 + 14 * 1.9e-6 + 14e-6 + 1e9 / 100e9
    assert machine.collective_seconds(between, 1e9) == pytest.approx(expected, rel=1e-12)
    assert machine.collective_seconds(AxisPlacement(ranks=1, in_node=1, nodes=1), 1e12) == 0.0


@pytest.mark.parametrize("name", LIMITS)
def test_efficiencies_have_limits(name):
    (least, most), default = LIMITS[name], getattr(Efficiencies(), name)
    for value in (least, most):
        assert getattr(Efficiencies(**{name: value}), name) == value
    for value in (least - 1e-3, most + 1e-3, math.nan, math.inf, "0.5", None, True, [0.5], 10**400):
        with pytest.raises(ConfigError) as caught:
            Efficiencies(**{name: value})
        assert str(caught.value).startswith(f"cluster.efficiencies.{name}=")
        assert f"must lie between {least:g} and {most:g}; try {default:g}, or leave it out" in str(caught.value)


def test_efficiencies_of_a_cluster_replace_the_fitted_ones():
    machine = machine_of(made(cluster={"efficiencies": {"link": 0.123}}))
    assert machine.efficiencies == dataclasses.replace(fitted(), link=0.123)
    with pytest.raises(
        ConfigError, match=r"^cluster\.efficiencies\.produkt=1: is not an efficiency; there are product, "
    ):
        changed(Efficiencies(), {"produkt": 1})


def test_the_file_says_how_the_values_were_found():
    facts = json.loads(FILE.read_text())
    assert set(facts) == {
        "date", "runs", "median_error", "cross_validated_median_error", "allocator_excess", "memory_error",
        "efficiencies",
    }  # fmt: skip
    assert set(facts["efficiencies"]) == set(LIMITS)
    assert 1 <= allocator_excess() < 1.5


def test_the_totals_of_a_step_take_a_tree():
    """Up and down: a chain of seven hops in a node, and a hop for each doubling of the nodes."""
    machine = machine_of(made())
    for nodes, levels in ((2, 1), (512, 9), (2048, 11)):
        axis = AxisPlacement(ranks=8 * nodes, in_node=8, nodes=nodes)
        assert machine.tree_seconds(axis, 0.0) == pytest.approx(20e-6 + 2 * (levels * 14e-6 + 7 * 1.9e-6))
    assert machine.tree_seconds(AxisPlacement(ranks=1, in_node=1, nodes=1), 8.0) == 0.0

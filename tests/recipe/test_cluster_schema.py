"""Fields of a cluster: which facts there may be, and which of them give a run another name."""

from __future__ import annotations

import math

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import Cluster
from titanlab.records import canonical

RATES = (
    "memory_gb",
    "link_gb_per_second",
    "network_gb_per_second",
    "peak_tflops",
    "memory_gb_per_second",
    "allocator_excess",
    "message_excess",
    "process_gb",
)


def refusal(**fields):
    with pytest.raises(ConfigError) as refused:
        Cluster(**fields)
    return str(refused.value)


def test_an_unknown_accelerator_is_refused():
    assert refusal(accelerator="tpu") == "cluster.accelerator=tpu: is no accelerator; try auto, cpu, cuda"
    assert [Cluster(accelerator=name).accelerator for name in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]


@pytest.mark.parametrize("count", [0, -1])
def test_there_is_at_least_one_of_what_is_counted(count):
    for name in ("per_node", "nodes"):
        assert refusal(**{name: count}) == f"cluster.{name}={count}: must be at least 1; try 8, or null"
    assert refusal(linked_nodes=count) == f"cluster.linked_nodes={count}: must be at least 1; try 1"
    assert Cluster(per_node=1, nodes=1, linked_nodes=1).nodes == 1


@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_a_positive_number_or_unknown(name):
    for value in (0.0, -1.0):
        assert refusal(**{name: value}).startswith(f"cluster.{name}={value}: must be a positive number; try ")
    for value in (math.nan, math.inf):
        assert refusal(**{name: value}).startswith(f"cluster.{name}={value}: must be a ")
    for value in (None, 1e-3):
        assert getattr(Cluster(**{name: value}), name) == value


def test_a_run_is_named_after_its_device_and_not_after_what_is_known_of_it():
    """What the planner takes from a cluster does not change what a run computes."""
    facts = {**dict.fromkeys(RATES, 2.0), "per_node": 8, "nodes": 2, "linked_nodes": 2, "efficiencies": {"link": 0.5}}
    plain = Cluster(accelerator="cuda", device="NVIDIA H200")
    assert canonical(Cluster(accelerator="cuda", device="NVIDIA H200", **facts)) == canonical(plain)
    assert canonical(Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")) != canonical(plain)

"""Configs of launchers, and the shapes of jobs that follow from a layout and a cluster."""

import dataclasses
import json
from dataclasses import dataclass

import msgspec
import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, LaunchConfig, default_config, launchers, shape_of
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.recipe import Cluster

GPUS = {"accelerator": "cuda", "device": "NVIDIA H200"}


def recipe(tmp_path, *, cluster, launch=None, **degrees):
    made = tiny.recipe(tmp_path, global_batch=48, dim=96, heads=12, kv_heads=12, **degrees)
    return dataclasses.replace(made, cluster=cluster, launch=launch or Slurm())


@pytest.mark.parametrize(
    ("degrees", "per_node", "nodes", "tasks"),
    [
        ({"shard": 1}, 8, 1, 1),
        ({"shard": 8}, 8, 1, 8),
        ({"shard": 12}, 8, 2, 6),
        ({"shard": 16}, 8, 2, 8),
        ({"shard": 6}, 4, 2, 3),
        # Two nodes of six would part a group of four.
        ({"shard": 3, "tensor": 4}, 8, 3, 4),
        # No number of nodes keeps it together: the fewest.
        ({"shard": 1, "tensor": 12}, 8, 2, 6),
    ],
)
def test_nodes_are_the_fewest_that_the_world_fills(tmp_path, degrees, per_node, nodes, tasks):
    shape = shape_of(recipe(tmp_path, cluster=Cluster(per_node=per_node, **GPUS), **degrees))
    assert (shape.nodes, shape.tasks_per_node, shape.gpus_per_node) == (nodes, tasks, tasks)
    assert shape.nodes * shape.tasks_per_node == shape.processes


def test_what_launch_says_is_in_the_shape(tmp_path):
    launch = Slurm(cpus_per_task=4, memory_gib=10.5, minutes=90)
    shape = shape_of(recipe(tmp_path, cluster=Cluster(per_node=8, **GPUS), launch=launch, shard=16))
    assert (shape.cpus_per_task, shape.memory_gib, shape.minutes, shape.gpu_hours) == (4, 10.5, 90, 24.0)
    assert msgspec.convert(json.loads(json.dumps(shape.to_mapping())), JobShape) == shape


def test_on_this_host_a_job_is_one_node(tmp_path):
    cpu = Cluster(accelerator="cpu", device="cpu")
    assert shape_of(recipe(tmp_path, cluster=cpu, launch=Local(), shard=16)) == JobShape(
        processes=16, tasks_per_node=16
    )
    gpu = shape_of(recipe(tmp_path, cluster=Cluster(**GPUS), launch=Local(), shard=2))
    assert (gpu.nodes, gpu.gpus_per_node, gpu.gpu_hours) == (1, 2, None)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (Cluster(), "cluster.accelerator=auto: is whatever this host has, and launch=slurm runs elsewhere; name the"),
        (Cluster(accelerator="cuda"), "cluster.device=null: is whatever this host has"),
        (Cluster(accelerator="cpu"), "cluster.per_node=null: launch=slurm derives the nodes of a job from it"),
        (
            Cluster(per_node=2, nodes=4, **GPUS),
            "world=16: is more than the cluster has, 4 nodes with 2 processes each; try world=8",
        ),
    ],
)
def test_a_cluster_has_to_be_named_and_large_enough(tmp_path, cluster, told):
    with pytest.raises(ConfigError, match=told):
        shape_of(recipe(tmp_path, cluster=cluster, shard=16))


@pytest.mark.parametrize(
    "given",
    [
        *({"extra": {flag: "x"}} for flag in ("--x", "time=5 --wrap", "job-name", "")),
        *({"environment": {name: "1"}} for name in ("A;x", "1A", "")),
        {"account": "a\n#SBATCH --wrap=x"},
    ],
)
def test_no_value_becomes_another_line_or_flag_of_the_batch_file(given):
    with pytest.raises(ConfigError, match=r"^launch\."):
        Slurm(**given)


def test_the_smallest_values_are_accepted():
    ones = dict.fromkeys(("cpus_per_task", "minutes", "array_parallelism", "threads", "signal_seconds"), 1)
    least = Slurm(memory_gib=0, max_requeues=0, restarts=1, min_world=1, environment={"_": ""}, **ones)
    assert (least.minutes, least.memory_gib, least.environment) == (1, 0, {"_": ""})
    # The warning may take all but a second of the time.
    assert Slurm(minutes=2, signal_seconds=119).signal_seconds == 119


@dataclass(kw_only=True)
class Demanding(LaunchConfig):
    kind: str = "demanding"
    queue: str

    def implementation(self):
        raise AssertionError("is not made")


def test_a_launcher_whose_config_lacks_a_default_is_one_line(monkeypatch):
    """Each rank asks every launcher whether that has started it."""
    monkeypatch.setattr(launchers, "schema_of", lambda group, kind: Demanding)
    with pytest.raises(
        ConfigError, match=r"^launch=demanding: cannot be made without settings \(.*'queue'\); its fields"
    ):
        default_config("demanding")

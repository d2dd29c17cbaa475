"""Configs of launchers, and the shapes of jobs that follow from a layout and a cluster."""

import dataclasses
import json
import math
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
        (Cluster(per_node=2, nodes=4, **GPUS), "world=16: is more than the cluster's 4 nodes of 2; try world=8"),
    ],
)
def test_a_cluster_has_to_be_named_and_large_enough(tmp_path, cluster, told):
    with pytest.raises(ConfigError, match=told):
        shape_of(recipe(tmp_path, cluster=cluster, shard=16))


def test_keys_of_local_and_cluster():
    with pytest.raises(ConfigError, match=r"launch.at_once=0: must be at least 1"):
        Local(at_once=0)
    with pytest.raises(ConfigError, match=r"cluster.per_node=0: must be at least 1"):
        Cluster(per_node=0)
    with pytest.raises(ConfigError, match=r"cluster.memory_gb=-1: must be a positive number"):
        Cluster(memory_gb=-1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"minutes": 0}, "launch.minutes=0: must be at least 1; try 60, or null"),
        ({"signal_seconds": 0}, "launch.signal_seconds=0: must be at least 1; try 120$"),
        ({"minutes": 2}, "launch.signal_seconds=120: leaves nothing of the 2 minutes that a job has; try 20"),
        ({"memory_gib": -1.0}, "launch.memory_gib=-1.0: must not be negative"),
        ({"max_requeues": -1}, "launch.max_requeues=-1: must not be negative"),
        ({"partition": " "}, "launch.partition= *: must be a name"),
        ({"environment": {"A-B": "1"}}, "launch.environment=A-B: is no name of a variable"),
        ({"extra": {"--x": 1}}, "launch.extra=--x: is no flag of sbatch; write it long, without the dashes"),
        ({"extra": {"ntasks_per_node": 1}}, "launch.extra.ntasks_per_node=1: is titanlab's own"),
        ({"extra": {"job-name": "x"}}, "launch.extra.job-name=x: is titanlab's own"),
        ({"extra": {"time=5 --wrap": "x"}}, "launch.extra=time=5 --wrap: is no flag of sbatch"),
        ({"extra": {"exclusive": "yes"}}, "launch.extra.exclusive=yes: is text, and .* takes none; try true"),
        ({"extra": {"use_min_nodes": "Off"}}, "launch.extra.use_min_nodes=Off: is text, and this flag .*; try false"),
        ({"extra": {"": "x"}}, "launch.extra=: is no flag of sbatch"),
        ({"cpus_per_task": -1}, "launch.cpus_per_task=-1: must be at least 1; try 8, or null"),
        ({"array_parallelism": 0}, "launch.array_parallelism=0: must be at least 1; try 8, or null"),
        ({"threads": 0}, "launch.threads=0: must be at least 1; try 1, or null"),
        ({"memory_gib": math.nan}, "launch.memory_gib=nan: must not be negative"),
        ({"account": "a\n#SBATCH --wrap=x"}, "launch.account=.*: must be a name; name one, or null"),
        ({"python": ""}, "launch.python=: must be a name"),
        ({"environment": {"1A": "1"}}, "launch.environment=1A: is no name of a variable"),
        ({"environment": {"A;x": "1"}}, "launch.environment=A;x: is no name of a variable"),
        ({"environment": {"": "1"}}, "launch.environment=: is no name of a variable"),
        ({"restarts": -1}, "launch.restarts=-1: must not be negative"),
        ({"min_world": 2}, "launch.min_world=2: says how small a restarted run may become, and launch.restarts=0"),
        ({"min_world": 0, "restarts": 1}, "launch.min_world=0: must be at least 1"),
    ],
)
def test_keys_of_slurm(given, told):
    with pytest.raises(ConfigError, match=told):
        Slurm(**given)


def test_the_smallest_values_are_accepted():
    ones = dict.fromkeys(("cpus_per_task", "minutes", "array_parallelism", "threads", "signal_seconds"), 1)
    least = Slurm(memory_gib=0, max_requeues=0, restarts=1, min_world=1, environment={"_": ""}, **ones)
    assert (least.minutes, least.memory_gib, least.environment) == (1, 0, {"_": ""})


def test_the_warning_may_take_all_but_a_second_of_the_time():
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

"""`train` and `sweep` say when tensor parallelism sends between nodes, and what the planner would take instead."""

from __future__ import annotations

import re

import pytest

from titanlab.cli import main
from titanlab.cli.compose import compose
from titanlab.launch import execute
from titanlab.plan import beyond_node, for_planning
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import plan_study

GPUS = ["+recipe=llama3_1_70b_256gpus", "cluster=h100", "launch=slurm"]


def notices_of(*arguments):
    return [notice for notice in plan_study([*GPUS, *arguments]).notices if "sends between nodes" in notice]


def test_a_sweep_says_it_once_with_a_layout_that_stays_in_its_node():
    (line,) = notices_of("cluster.per_node=4", "seed=0,1")
    assert line.startswith("seed0, the first of 2 such runs: parallelism.tensor=8 sends between nodes of 4 devices")
    own, better = (int(found.replace(",", "")) for found in re.findall(r"(?:estimated|with) ([\d,]+)", line))
    assert better > own
    # What it names composes, also with the data's 96 streams, and says nothing any more.
    keys = line.rpartition(": ")[2].split()
    assert not notices_of("cluster.per_node=4", "parallelism.async_tensor=false", *keys)


@pytest.mark.parametrize(
    "inside",
    [
        ["cluster.per_node=8"],
        # A rack is one node to tensor parallelism.
        ["cluster.per_node=4", "cluster.linked_nodes=18"],
        ["cluster.per_node=4", "parallelism.tensor=4", "parallelism.shard=64", "data=c4_128_streams"],
        ["cluster.per_node=256"],
    ],
)
def test_nothing_is_said_of_tensor_parallelism_in_a_node(inside):
    assert not notices_of(*inside)


def test_ranks_that_do_not_fill_nodes_evenly_leave_them():
    (recipe,) = compose([*GPUS, "parallelism.tensor=4", "parallelism.shard=64"])
    recipe = for_planning(recipe, stands=True)
    assert recipe.leaves_node(6)
    assert "between nodes of 6 devices" in beyond_node(recipe, 6)


@pytest.mark.parametrize(("local", "is_said"), [(2, True), (4, False)])
def test_a_run_that_torchrun_has_started_on_several_nodes_says_it(monkeypatch, capsys, tmp_path, local, is_said):
    values = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": 29500}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(execute, "execute", lambda ready, console: Outcome(kind=OutcomeKind.DONE, attempt=0))
    arguments = ["parallelism.tensor=4", "model.kv_heads=4", "data=synthetic", "cluster.accelerator=cpu"]
    assert main(["train", *arguments, f"runs={tmp_path}"]) == 0
    assert ("parallelism.tensor=4 sends between nodes of 2 devices" in capsys.readouterr().out) == is_said

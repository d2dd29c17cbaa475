"""Every sweep that is shipped composes, and all of its points can be run where it is meant to be."""

from __future__ import annotations

import socket

import pytest
import yaml

from tests.sweep.files import dropped, plan
from titanlab.distributed import Host
from titanlab.recipe import conf_folder
from titanlab.sweep import decide
from titanlab.sweep import plan as studies

FILES = sorted((conf_folder() / "sweeps").glob("*.yaml"))
# What is planned in `make test` too.
ALWAYS = ("long_context_8b", "stack_70b_256gpus_cpu", "moe_expert_parallel")
# Name → runs, points that are dropped, processes of the largest.
EXPECTED = {
    "ac_memory": (85, 0, 8),
    "cpu_1d_to_4d": (12, 0, 16),
    "cpu_calibration": (108, 36, 2),
    "llama3_8b_8gpus_layouts": (88, 0, 8),
    "long_context_405b": (16, 0, 512),
    "long_context_405b_cpu": (16, 0, 8),
    "long_context_8b": (37, 3, 64),
    "long_context_8b_cpu": (16, 0, 8),
    "moe_expert_parallel": (11, 0, 8),
    "pipeline_schedules": (34, 0, 8),
    "quickstart_layouts": (12, 0, 8),
    "scaling_70b": (31, 0, 512),
    "scaling_70b_cpu": (16, 0, 4),
    "scaling_8b": (46, 0, 512),
    "scaling_8b_cpu": (16, 0, 4),
    "stack_405b_512gpus": (13, 0, 512),
    "stack_405b_512gpus_cpu": (13, 0, 2),
    "stack_70b_256gpus": (16, 0, 256),
    "stack_70b_256gpus_cpu": (13, 3, 2),
    "stack_8b_128gpus": (16, 0, 128),
    "stack_8b_128gpus_cpu": (16, 0, 2),
}
# A twin names what has none: AsyncTP needs GPUs.
BY_RULE = {"stack_70b_256gpus_cpu": ["async_tensor"]}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def connect(*given):
        raise AssertionError("a plan asks nobody")

    monkeypatch.setattr(socket.socket, "connect", connect)


def test_all_are_expected():
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in ALWAYS else [pytest.mark.full]) for path in FILES],
)
def test_it_plans(path, monkeypatch, tmp_path):
    name = path.stem
    on_gpus = "override /cluster" in path.read_text()
    if on_gpus:
        monkeypatch.setattr(studies, "this_host", lambda: pytest.fail("asked this host"))
        where = ["launch=slurm", "launch.minutes=30"]
    else:
        monkeypatch.setattr(studies, "this_host", lambda: Host(accelerator="cpu", device="cpu", count=2))
        where = ["launch=local"]
    found = plan(f"+sweeps={name}", *where, f"runs={tmp_path}")
    # The file does not depend on whether Slurm is here and answers.
    decisions = decide(found, answered=False)
    assert (found.name, found.origin) == (name, f"sweeps/{name}")
    runs, left_out, largest = EXPECTED[name]
    assert (len(found.planned), len(found.dropped)) == (runs, left_out), dropped(found)
    assert {stage for _, stage, _ in dropped(found)} <= ({"rule"} if name in BY_RULE else {"where"})
    assert all(word in reason for word in BY_RULE.get(name, []) for *_, reason in dropped(found))
    assert max(each.shape.processes for each in decisions) == largest
    if on_gpus:
        assert {each.shape.gpus_per_node for each in decisions} == {8}
        device = "NVIDIA H100" if name == "long_context_405b" else "NVIDIA H100 80GB HBM3"
        assert {each.planned.recipe.cluster.device for each in decisions} == {device}
    if (name.startswith(("stack", "scaling", "long"))) and not name.endswith("_cpu"):
        assert f"{name}_cpu" in EXPECTED
    # Names tell the runs apart, and fit on a line.
    assert len({each.planned.recipe.name for each in decisions}) == runs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_says_what_it_is_for(path):
    text = path.read_text()
    assert text.startswith("# @package _global_\n# ")
    content = yaml.safe_load(text)
    assert content["sweep"] == path.stem
    assert content["hydra"]["mode"] == "MULTIRUN"
    assert {"override /hydra/sweeper": "space"} in content["defaults"]

"""The programs that look at torch for the doctor: one line of JSON each, without titanlab."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanlab.doctor import torch_script


def test_it_needs_nothing_of_titanlab():
    """It runs with a torch that titanlab cannot use."""
    tree = ast.parse(Path(torch_script.__file__).read_text())
    imports = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imports if name.startswith("titanlab")]


def test_facts_are_values_of_json():
    facts = torch_script.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["version"] == str(torch.__version__)
    assert facts["distributed"] is True


def test_without_distributed_there_is_no_backend(monkeypatch):
    """A torch that was built without it has none of its functions."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    for name in ("is_gloo_available", "is_nccl_available"):
        monkeypatch.delattr(dist, name)
    facts = torch_script.facts()
    assert (facts["distributed"], facts["gloo"], facts["nccl"]) == (False, False, False)


def test_devices_are_described(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "H", 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} == {0, 2})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    facts = torch_script.facts()
    assert facts["devices"][0] == {"name": "H", "memory_gib": 80.0, "capability": [9, 0], "peers": [2]}
    assert [device["peers"] for device in facts["devices"]] == [[2], [], [0]]
    assert (facts["nccl_version"], facts["product"]) == ("2.30.1", 64.0**3)


@pytest.mark.filterwarnings("ignore")
def test_one_rank_adds_up_its_own_tensor(tmp_path):
    result = torch_script.all_reduce("gloo", 0, 1, str(tmp_path / "store"))
    assert (result["total"], result["expected"]) == (1.0, 1.0)
    assert result["seconds"] >= 0
    assert not dist.is_initialized()

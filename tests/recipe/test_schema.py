"""Fields of `training` and `cluster`: which numbers there may be; the shipped clusters.

tests/cli/test_refusals.py has the lines of mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from titanlab.costs import find_device
from titanlab.options import discover, schema_of
from titanlab.recipe import Cluster, Training, conf_folder, schema_node
from titanlab.records import canonical

RATES = ("memory_gb", "link_gb_per_second", "network_gb_per_second", "peak_tflops", "memory_gb_per_second")
RATES += ("allocator_excess", "message_excess", "process_gb")


def test_null_leaves_a_limit_out():
    names = ("microbatch", "max_grad_norm", "step_timeout_seconds", "first_step_timeout_seconds")
    assert [getattr(Training(**dict.fromkeys(names)), name) for name in names] == [None] * 4
    assert {getattr(Cluster(**dict.fromkeys(RATES)), name) for name in RATES} == {None}
    # As a chunk it is 0, so that both have one name.
    assert Training(loss_chunk=None).loss_chunk == Training(loss_chunk=0).loss_chunk == 0


def test_a_run_is_named_after_its_device_and_not_after_what_is_known_of_it():
    """What the planner takes from a cluster does not change what a run computes."""
    facts = {**dict.fromkeys(RATES, 2.0), "per_node": 8, "nodes": 2, "linked_nodes": 2, "efficiencies": {"link": 0.5}}
    facts["attention_tflops"] = {"flash forward": 500.0}
    plain = Cluster(accelerator="cuda", device="NVIDIA H200")
    assert canonical(Cluster(accelerator="cuda", device="NVIDIA H200", **facts)) == canonical(plain)
    assert canonical(Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")) != canonical(plain)


FOLDER = Path(__file__).parents[2] / "conf" / "cluster"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "local")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset(name):
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert values.pop("defaults") == ["schema", "_self_"]
    cluster = Cluster(**values)
    assert cluster.per_node * cluster.linked_nodes == (72 if name == "gb200" else 8)
    if cluster.accelerator == "cpu":
        assert cluster.device == "cpu"
        return
    device = find_device(str(cluster.device))
    assert device is not None
    assert device.peak_tflops["bfloat16"] > 0
    assert (cluster.memory_gb, cluster.link_gb_per_second) == (device.memory_gb, device.link_gb_per_second)


def test_there_is_one_for_each_kind_of_node():
    kinds = "a100_40gb a100_80gb b200 cpu gb200 h100 h100_100gbe h100_25gbe h100_96gb h200"
    assert kinds.split() == PRESETS


# The YAMLs of options hold only what differs from the defaults of their dataclasses


FILES = sorted(path for group in discover() for path in (conf_folder() / group).glob("*.yaml"))


def contents(path: Path) -> tuple[list[str], DictConfig]:
    """The defaults list of an option's file, and its own keys."""
    keys = OmegaConf.load(path)
    assert isinstance(keys, DictConfig)
    return list(keys.pop("defaults")), keys


def inherited(path: Path) -> Any:
    """The values that an option has without its file's own keys: of a schema, or of another option."""
    (base, own), _ = contents(path)
    assert own == "_self_"
    group = path.parent.name
    if base.endswith("schema"):
        return schema_node(schema_of(group, base.removesuffix("schema").removesuffix("_") or None))
    option = path.with_name(f"{base}.yaml")
    return OmegaConf.merge(inherited(option), contents(option)[1])


def leaves(keys: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, value in keys.items_ex(resolve=False):
        if isinstance(value, DictConfig) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def plain(config: Any, key: str) -> Any:
    value = config
    for name in key.split("."):
        value = None if OmegaConf.is_missing(value, name) else value._get_node(name)
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)


def repeated(path: Path) -> list[str]:
    """The keys of a file that can be deleted without a change of the option's values."""
    _, keys = contents(path)
    base = inherited(path)
    merged = OmegaConf.merge(base, keys)
    return [key for key in leaves(keys) if plain(base, key) == plain(merged, key)]


def test_an_option_repeats_no_default():
    assert len(FILES) > 90
    found = [f"conf/{path.parent.name}/{path.name}: {key}" for path in FILES for key in repeated(path)]
    assert not found, "delete these keys, whose values are the defaults:\n" + "\n".join(found)

"""The shipped clusters: their devices are in the table of hardware, which says the same of them."""

from pathlib import Path

import pytest
import yaml

from titanlab.costs import find_device
from titanlab.recipe import Cluster

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
    assert PRESETS == ["a100_40gb", "a100_80gb", "b200", "cpu", "gb200", "h100", "h100_96gb", "h200"]

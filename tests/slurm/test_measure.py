"""`titanlab plan --measure` as a job of Slurm: on one node, and on two, between which it measures the network."""

import pytest
import yaml

pytestmark = pytest.mark.slurm

SMALL = ("profiler.seconds=0.005", "profiler.largest=64", "profiler.megabytes=1", "launch.threads=1")


@pytest.mark.parametrize(("world", "per_node", "links"), [(2, 2, {"link"}), (4, 2, {"link", "network"})])
def test_nodes_are_measured_by_a_job(site, world, per_node, links):
    file = site.folder / "mine" / "cluster" / f"nodes{world}.yaml"
    said = site.titanlab(
        "plan", "--measure", "launch=slurm", "cluster=cpu", f"cluster.per_node={per_node}", f"world={world}",
        "launch.partition=high", "launch.minutes=5", f"runs={site.folder}/measured{world}", "--out", str(file), *SMALL,
    )  # fmt: skip
    assert said.code == 0, said.err
    assert f"µs, {world} ranks of {'a node' if world == per_node else 'several nodes'}" in said.out
    values = yaml.safe_load(file.read_text())
    assert (values["per_node"], values["accelerator"]) == (per_node, "cpu")
    # On a busy host the times of these small messages need not grow with their sizes: then that is said.
    for name in links:
        assert (name in values["efficiencies"]) != (f"no bandwidth of the {name}: " in said.err)

"""A calibration finds the efficiencies with which runs were made up, and refuses what says nothing."""

import dataclasses
import math

import pytest
import yaml
from omegaconf import OmegaConf

from tests.plan.recipes import SMALL, made
from titanlab.errors import ConfigError
from titanlab.plan import Measured, calibrate, calibration_lines, cluster_file, machine_of, most_memory, reserved_bytes
from titanlab.plan.calibration import memory_errors, time_errors
from titanlab.plan.machine import fitted
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time
from titanlab.recipe import Cluster

TRUTH = dataclasses.replace(fitted(), product=0.4, eager_memory=0.25, link=0.2)


def measured(**changes):
    """Runs of a machine with the efficiencies `TRUTH`, which takes 1.3 bytes for each byte of tensors."""
    runs = []
    for degrees in ({}, {"shard": 4}, {"tensor": 4}, {"shard": 2, "tensor": 2}):
        for seq_len in (512, 4096):
            recipe = made(model=SMALL, seq_len=seq_len, batch=64, **degrees)
            machine = dataclasses.replace(machine_of(recipe), efficiencies=TRUTH)
            run = Measured(
                name=f"{recipe.layout.label}-{seq_len}",
                recipe=recipe,
                step_seconds=step_time(recipe, machine).seconds,
                memory_bytes=1.3 * most_memory(recipe).allocated,
            )
            runs.append(dataclasses.replace(run, **changes) if not runs else run)
    return runs


@pytest.fixture(scope="module")
def calibration():
    return calibrate(measured())


def test_errors_before_and_after(calibration):
    assert list(calibration.after) == ["all", "one process", "shard", "shard·tensor", "tensor"]
    assert calibration.before["all"].time > 0.2
    # The weight that holds parameters to their start leaves a little error.
    assert calibration.after["all"].time < 0.01
    assert calibration.after["all"].runs == 8
    assert calibration.cluster.allocator_excess == pytest.approx(1.3, rel=1e-9)
    assert calibration.cluster.process_gb is None
    assert calibration.after["all"].memory < 1e-6 < calibration.before["all"].memory


def test_runs_that_were_not_used_are_estimated_too(calibration):
    recipe = made(model=SMALL, seq_len=1024, batch=32, shard=2)
    machine = dataclasses.replace(machine_of(recipe), efficiencies=TRUTH)
    other = Measured(name="other", recipe=recipe, step_seconds=step_time(recipe, machine).seconds)
    assert abs(time_errors([other], calibration.cluster)[0]) < 0.03
    assert math.isnan(memory_errors([other], calibration.cluster)[0])
    assert time_errors([], calibration.cluster) == memory_errors([], calibration.cluster) == []


def test_the_text_has_every_family_and_value(calibration):
    text = calibration_lines(calibration)
    assert text[0].split() == ["layouts", "runs", "time", "after", "memory", "after"]
    assert [line.split("  ")[0].strip() for line in text[1:6]][1].startswith("one process")
    assert any(line.startswith("product ") for line in text)
    assert any(line.startswith("allocator_excess ") for line in text)


def test_the_file_is_a_cluster(calibration):
    text = cluster_file(calibration.cluster, "Calibrated with 8 recipes.")
    assert text.splitlines()[1] == "# Calibrated with 8 recipes."
    values = yaml.safe_load(text)
    assert values.pop("defaults") == ["schema", "_self_"]
    recipe = dataclasses.replace(measured()[0].recipe, cluster=Cluster(**values))
    found = machine_of(recipe)
    assert found.efficiencies.product == pytest.approx(calibration.cluster.efficiencies["product"], rel=1e-5)
    assert reserved_bytes(recipe, found, most_memory(recipe)) == pytest.approx(
        1.3 * most_memory(recipe).allocated, rel=1e-5
    )


def test_the_name_of_a_device_in_the_file_is_no_interpolation():
    text = cluster_file(Cluster(accelerator="cpu", device="a${b\\${seed}"), "By hand.")
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True)["device"] == "a${b\\${seed}"


# Cores that are slower and processes that are larger than what is assumed of CPUs.
CORES = Cluster(
    accelerator="cpu", device="cpu", per_node=2, peak_tflops=0.08, memory_gb_per_second=4.0, link_gb_per_second=0.7,
    process_gb=0.3, allocator_excess=1.4, message_excess=0.9, efficiencies={"product": 0.7, "latency": 3.0},
)  # fmt: skip


def on_cpus():
    """Runs of `CORES` whose recipes know nothing of it but the peak."""
    runs = []
    for degrees in ({}, {"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}):
        for seq_len in (128, 512):
            recipe = dataclasses.replace(made(model=SMALL, seq_len=seq_len, batch=8, **degrees), cluster=CORES)
            machine = machine_of(recipe)
            known = Cluster(accelerator="cpu", device="cpu", per_node=2, peak_tflops=0.08)
            run = Measured(
                name=f"{recipe.layout.label}-{seq_len}",
                recipe=dataclasses.replace(recipe, cluster=known),
                step_seconds=step_time(recipe, machine, pipeline=simulated_time).seconds,
                memory_bytes=reserved_bytes(recipe, machine, most_memory(recipe)),
            )
            runs.append(run)
    return runs


def test_a_cpu_gets_rates_and_the_memory_of_a_process():
    calibration = calibrate(on_cpus())
    found = calibration.cluster
    assert calibration.before["all"].time > 0.2
    assert calibration.after["all"].time < 0.03
    assert found.process_gb == pytest.approx(0.3, rel=1e-3)
    assert found.allocator_excess == pytest.approx(1.4, rel=1e-3)
    assert found.message_excess == pytest.approx(0.9, rel=1e-2)
    assert calibration.after["all"].memory < 1e-3
    # Rates are those that were reached, and shares of them at most 1.
    assert found.memory_gb_per_second < 8
    assert max(found.efficiencies["eager_memory"], found.efficiencies["fused_memory"]) == 1.0
    # What was found is a start for other runs.
    again = calibrate([dataclasses.replace(run, recipe=with_cluster(run.recipe, found)) for run in on_cpus()])
    assert again.before["all"].time == pytest.approx(calibration.after["all"].time)
    assert again.after["all"].time < 0.03


def test_one_process_says_nothing_of_messages():
    found = calibrate([run for run in on_cpus() if run.recipe.layout.world == 1] * 2).cluster
    assert found.message_excess is None
    assert found.process_gb == pytest.approx(0.3, rel=1e-2)


def with_cluster(recipe, cluster):
    return dataclasses.replace(recipe, cluster=cluster)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_times_and_memory_that_are_none(value):
    with pytest.raises(ConfigError, match="--calibrate"):
        calibrate(measured(step_seconds=value))
    with pytest.raises(ConfigError, match="--calibrate"):
        calibrate(measured(memory_bytes=value))


def test_too_few_runs_and_several_clusters():
    with pytest.raises(ConfigError, match="at least 4"):
        calibrate(measured()[:3])
    other = made(model=SMALL, seq_len=512, batch=64, cluster={"per_node": 4})
    with pytest.raises(ConfigError, match="different clusters"):
        calibrate([*measured(), Measured(name="other", recipe=other, step_seconds=1.0)])

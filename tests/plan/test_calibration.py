"""Clusters from measurements: rates are those that were measured; a calibration finds the values behind made-up runs."""

import dataclasses
import math

import pytest
import yaml
from omegaconf import OmegaConf

from tests.plan.recipes import SMALL, made
from titanlab.errors import ConfigError
from titanlab.plan import (
    Measured,
    calibrate,
    calibration_lines,
    cluster_file,
    doubts,
    machine_of,
    measured_cluster,
    most_memory,
    rate_lines,
    reserved_bytes,
)
from titanlab.plan.calibration import fit_sum, memory_errors, time_errors
from titanlab.plan.machine import LIMITS, AxisPlacement, allocator_excess, fitted
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
    text = [line.split() for line in calibration_lines(calibration)]
    assert text[0] == ["layouts", "runs", "time", "after", "memory", "after"]
    assert text[2][:3] == ["one", "process", "2"]
    assert {"product", "allocator_excess"} < {line[0] for line in text if line}


def test_one_wrong_run_does_not_decide_and_values_stay_within_their_limits():
    runs = measured()
    found = calibrate([*runs, dataclasses.replace(runs[0], step_seconds=1e6 * runs[0].step_seconds)]).cluster
    assert abs(time_errors(runs[1:], found)[0]) < 0.15
    assert all(least <= found.efficiencies[name] <= most for name, (least, most) in LIMITS.items())
    # What no run depends on stays: there is one node.
    assert found.efficiencies["network"] == pytest.approx(fitted().network, rel=1e-3)


def test_factors_of_a_sum_are_not_negative_and_hold_where_rows_do_not_decide():
    factors = fit_sum([[1.0] * 4, [1.0, 2.0, 3.0, 4.0]], [9.0, 8.0, 7.0, 6.0])
    assert factors[1] == 0.0
    assert 6.0 <= factors[0] <= 9.0
    factors = fit_sum([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], [7.0, 7.0], [3.0, 2.0, 5.0])
    assert factors == pytest.approx([3.0, 2.0, 5.0])


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
    again = calibrate(
        [dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, cluster=found)) for run in on_cpus()]
    )
    assert again.before["all"].time == pytest.approx(calibration.after["all"].time)
    assert again.after["all"].time < 0.03


def test_one_process_says_nothing_of_messages():
    found = calibrate([run for run in on_cpus() if run.recipe.layout.world == 1] * 2).cluster
    assert found.message_excess is None
    assert found.process_gb == pytest.approx(0.3, rel=1e-2)


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


# Figures of a core, with collectives of 200 µs and 1 GB/s.
FIXED, BANDWIDTH = 200e-6, 1e9
ROW = {
    "kind": "rates",
    "step": 0,
    "rates/product 128x128x128": 30e9,
    "rates/product 256x256x256": 60e9,
    "rates/product 512x512x512": 80e9,
    "rates/product 1024x1024x1024": 100e9,
    "rates/product 1024x256x768": 90e9,
    "rates/attention flash forward": 20e9,
    "rates/attention flash backward": 15e9,
    "rates/copy": 8e9,
    "rates/pointwise": 10e9,
    "rates/cast": 5e9,
    "rates/launch(s)": 4e-6,
    "rates/host(s)": 6e-6,
    "rates/hook(s)": 100e-6,
    "rates/process(B)": 0.4e9,
}
SIZES = [4**power for power in range(5, 13)]


def exchanges(group, ranks, fixed, bandwidth):
    """All-gathers whose time is that of a ring."""
    share = (ranks - 1) / ranks
    return {f"rates/collective {group} {ranks} all_gather {size}": fixed + size * share / bandwidth for size in SIZES}


def core():
    return dataclasses.replace(made(), cluster=Cluster(accelerator="cpu", device="cpu", per_node=2))


def with_rates(recipe, row):
    return machine_of(dataclasses.replace(recipe, cluster=measured_cluster(recipe, row)))


def test_a_cpu_reaches_what_was_measured():
    found = with_rates(core(), ROW | exchanges("node", 2, FIXED, BANDWIDTH))
    shares = found.efficiencies
    assert found.peak_flops["float32"] == pytest.approx(100e9)
    # The median of products that have the size of a model's.
    assert found.product_rate("float32") * shares.product == pytest.approx(90e9)
    assert found.flops_per_second("flash forward") == pytest.approx(20e9)
    assert found.flops_per_second("flash backward") == pytest.approx(15e9)
    # The rates of its operators have the host's time in them.
    assert (shares.host_seconds, shares.hook_seconds) == (0.0, 0.0)
    assert found.memory_bytes_per_second * shares.eager_memory == pytest.approx(10e9)
    assert found.memory_bytes_per_second * shares.fused_memory == pytest.approx(8e9)
    assert shares.launch_seconds == 4e-6
    assert (found.process_bytes, found.allocator_excess, found.notes) == (0.4e9, 1.0, ())
    axis = AxisPlacement(ranks=2, in_node=2, nodes=1)
    for size in SIZES:
        assert found.collective_seconds(axis, size / 2) == pytest.approx(FIXED + size / 2 / BANDWIDTH, rel=1e-3)


def test_one_process_measures_no_collective():
    found = measured_cluster(core(), ROW)
    assert "latency" not in found.efficiencies
    assert found.link_gb_per_second is None
    assert rate_lines(ROW)[-1] == "one process: no collective was measured"


@pytest.mark.parametrize("bandwidth", [math.inf, 1e13, -1e12], ids=["equal", "hardly growing", "shrinking"])
@pytest.mark.parametrize(("group", "name"), [("node", "link"), ("world", "network")])
def test_a_link_whose_times_do_not_grow_has_no_bandwidth_and_that_is_said(group, name, bandwidth):
    others = {"node": "world", "world": "node"}
    row = ROW | exchanges(group, 4, FIXED, bandwidth) | exchanges(others[group], 2, FIXED, BANDWIDTH)
    found = measured_cluster(core(), row)
    assert name not in found.efficiencies
    (line,) = doubts(row, found)
    assert line.startswith(f"no bandwidth of the {name}: ")
    row |= exchanges(group, 4, FIXED, BANDWIDTH)
    assert doubts(row, measured_cluster(core(), row)) == []
    assert doubts(ROW, measured_cluster(core(), ROW)) == []


def test_a_known_gpu_gets_shares_of_its_datasheet():
    recipe = made()
    row = {name: value for name, value in ROW.items() if name != "rates/process(B)"}
    row |= {"rates/product 1024x256x768": 600e12, "rates/product 1024x1024x1024": 600e12}
    row |= {"rates/product 512x512x512": 600e12, "rates/copy": 2.5e12, "rates/pointwise": 2e12}
    row |= {"rates/attention cudnn forward": 500e12, "rates/attention cudnn backward": 400e12}
    row |= exchanges("node", 8, 50e-6, 300e9) | exchanges("world", 16, 90e-6, 160e9)
    found = with_rates(recipe, row)
    assert found.peak_flops["bfloat16"] == 989e12
    assert found.product_rate("bfloat16") * found.efficiencies.product == pytest.approx(600e12)
    assert found.memory_bytes_per_second == 3350e9
    assert found.memory_bytes_per_second * found.efficiencies.fused_memory == pytest.approx(2.5e12)
    assert found.link_bytes_per_second * found.efficiencies.link == pytest.approx(300e9, rel=1e-3)
    assert [found.flops_per_second(f"cudnn {name}") for name in ("forward", "backward")] == [500e12, 400e12]
    # What was not measured is as in the table.
    assert found.flops_per_second("efficient forward") == machine_of(recipe).attention_flops["efficient forward"]
    assert (found.efficiencies.host_seconds, found.efficiencies.hook_seconds) == (6e-6, 100e-6)
    # A ring over nodes uses the eight adapters of each.
    assert found.network_bytes_per_second * found.efficiencies.network * 8 == pytest.approx(160e9, rel=1e-3)
    assert found.allocator_excess == allocator_excess()


def test_a_device_in_no_table_is_what_was_measured():
    recipe = made(device="NVIDIA Unheard-of")
    with pytest.raises(ConfigError, match="nothing is known of its speed"):
        machine_of(recipe)
    row = ROW | {"rates/copy": 2e12, "rates/pointwise": 1e12, "rates/product 1024x1024x1024": 500e12}
    found = with_rates(recipe, row)
    assert found.name == "NVIDIA Unheard-of"
    assert found.product_rate("bfloat16") == pytest.approx(500e12)
    assert found.memory_bytes_per_second == 2e12


def test_the_lines_name_every_figure():
    row = ROW | exchanges("node", 2, FIXED, BANDWIDTH) | exchanges("world", 4, FIXED, BANDWIDTH)
    text = [line.split() for line in rate_lines(row)]
    assert ["product", "1024x256x768", "90.0", "GFLOP/s"] in text
    assert ["launch", "4.00", "µs"] in text
    assert ["process", "0.40", "GB"] in text
    assert ["µs,", "4", "ranks", "of", "several", "nodes", "all_gather"] in text
    assert text.count(["1", "KiB", "201"]) == 2
    assert ["attention", "flash", "backward", "15.0", "GFLOP/s"] in text
    assert ["hook", "100.00", "µs"] in text
    # Fourteen figures, and two tables with a title and an empty line.
    assert len(text) == 14 + 2 * (2 + len(SIZES))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({name: value for name, value in ROW.items() if name != "rates/copy"}, "rates/copy: is missing"),
        ({**ROW, "rates/copy": 0.0}, "is not a figure of rates/copy"),
        ({**ROW, "rates/copy": math.nan}, "is not a figure of rates/copy"),
        ({**ROW, "rates/attention flash forward": None}, "is not a figure of rates/attention flash forward"),
        ({**ROW, "rates/collective node two all_gather 4": 1.0}, "is not the name of a collective"),
        ({}, "is missing in the measurement"),
    ],
)
def test_damaged_measurements(row, complaint):
    with pytest.raises(ConfigError, match=complaint):
        measured_cluster(core(), row)


@pytest.mark.parametrize(
    ("rates", "complaint"),
    [
        ({"flash": 1.0}, "flash=1.0: is not a kernel and a direction"),
        ({"flsh forward": 1.0}, "flsh forward=1.0: is not a kernel and a direction; .*flash, cudnn, efficient, flash3"),
        ({"flash forward": 0.0}, "must be a positive"),
        ({"flash forward": math.inf}, "must be a positive"),
    ],
)
def test_a_rate_of_attention_is_positive_and_names_its_kernel_and_direction(rates, complaint):
    with pytest.raises(ConfigError, match=complaint):
        machine_of(made(cluster={"attention_tflops": rates}))

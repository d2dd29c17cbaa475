"""The script that checks one half of a sweep with the other: how it splits, and what it keeps."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.benchmarks.scripts import script as imported
from tests.plan.recipes import SMALL, made
from titanlab.plan import Measured, machine_of, most_memory, reserved_bytes
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time
from titanlab.recipe import Cluster
from titanlab.sweep.measured_runs import LeftOut, MeasuredSweep

KNOWN = Cluster(accelerator="cpu", device="cpu", per_node=2, peak_tflops=0.1)
TRUE = dataclasses.replace(
    KNOWN, memory_gb_per_second=5.0, link_gb_per_second=1.0, process_gb=0.3, allocator_excess=1.3
)


@pytest.fixture(scope="module")
def script():
    return imported("cpu_calibration")


def row(number, *, slower=1.0, **given):
    recipe = dataclasses.replace(made(model=SMALL, batch=4, **given), cluster=TRUE)
    machine = machine_of(recipe)
    return Measured(
        name=f"r{number}-{number:08x}",
        recipe=dataclasses.replace(recipe, cluster=KNOWN),
        step_seconds=slower * step_time(recipe, machine, pipeline=simulated_time).seconds,
        memory_bytes=slower * reserved_bytes(recipe, machine, most_memory(recipe)),
    )


def test_rows_with_an_odd_hash_calibrate_and_the_others_are_checked(script):
    layouts = [{}, {"shard": 2}, {"tensor": 2}, {"replicate": 2}, {"context": 2}]
    odd = [row(2 * number + 1, seq_len=256, **layout) for number, layout in enumerate(layouts)]
    # Their measurements say something else, by which they are off, and which must not calibrate.
    even = [row(2 * number, slower=1.25, seq_len=128, **layout) for number, layout in enumerate(layouts)]
    left_out = [LeftOut(run="x", reason="ended as oom")]
    found = MeasuredSweep(rows=[*odd, *even], runs=30, left_out=left_out, machine="a core", stale=0)
    result = script.study(found)
    assert (result["rows_calibrating"], result["rows_checked"], result["left_out"]) == (5, 5, 1)
    assert result["median_error_of_calibrating_rows"]["time"] < 0.03
    assert result["median_error_after"]["time"] == pytest.approx(1 - 1 / 1.25, abs=0.05)
    assert result["median_error_after"]["memory"] == pytest.approx(1 - 1 / 1.25, abs=0.05)
    assert {name: family["rows"] for name, family in result["by_family"].items()} == dict.fromkeys(
        ("one process", "shard", "tensor", "replicate", "context"), 1
    )
    assert {line["row"] for line in result["rows"] if line["half"] == "checked"} == {each.name for each in even}
    json.dumps(result)


def test_a_renamed_folder_is_refused(script):
    renamed = dataclasses.replace(row(1, seq_len=128), name="mine")
    with pytest.raises(ValueError, match="mine: has no hash"):
        script.is_even(renamed)

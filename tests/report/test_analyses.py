"""Questions that a sweep answers, as frames: scaling, memory by item, pipelines, differences of losses, ranking."""

import math

import pytest

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan import ITEMS, most_memory
from titanlab.recipe import from_mapping
from titanlab.report import frames
from titanlab.report.analyses import (
    DIFFERENCE_COLUMNS,
    MEMORY_COLUMNS,
    SCALING_COLUMNS,
    differences_frame,
    largest_differences,
    memory_frame,
    pipelines_frame,
    ranking_text,
    scaling_frame,
    schedules,
    schedules_frame,
    timeline_of,
)
from titanlab.techniques.schedule.action import Kind


def done(made, name, speed, *, cores=8, repeat=0, **keys):
    run = made.run(name, point={"layout": name}, repeat=repeat, **keys)
    begin(run, cores=cores)
    train(run)
    end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed})


@pytest.fixture
def swept(made):
    done(made, "single", 1000.0)
    done(made, "fsdp", 1600.0, shard=2)
    done(made, "fsdp", 400.0, repeat=1, shard=2)
    done(made, "four", 500.0, cores=2, shard=4)
    lost = made.run("lost", shard=6)
    begin(lost)
    end(lost, "oom")
    return frames.sweep_frame(made.folder.path)


def test_efficiency_is_that_of_one_device(swept):
    scaling = scaling_frame(swept)
    assert list(scaling.columns) == list(SCALING_COLUMNS)
    assert list(scaling["world"]) == [1, 2, 4]
    assert list(scaling["efficiency_percent"]) == pytest.approx([100.0, 80.0, 50.0])
    assert list(scaling["speedup"]) == pytest.approx([1.0, 1.6, 2.0])
    assert list(scaling["runs"]) == [1, 2, 1]
    assert list(scaling["oversubscribed"]) == [False, False, True]
    assert set(scaling["reference"]) == {scaling["recipe"][0]}


def test_recipes_that_differ_in_more_than_the_layout_have_references_of_their_own(made, swept):
    done(made, "bf16", 2000.0, bf16=True)
    scaling = scaling_frame(frames.sweep_frame(made.folder.path))
    (other,) = scaling[scaling["recipe"].str.contains("bf16")].to_dict("records")
    assert (other["reference"], other["efficiency_percent"]) == (other["recipe"], 100.0)


def test_weak_scaling_compares_equal_batches_of_a_device(made, swept):
    batch = int(swept.global_batch[0])
    done(made, "weak", 950.0, shard=2, global_batch=2 * batch)
    runs = frames.sweep_frame(made.folder.path)
    strong, weak = scaling_frame(runs), scaling_frame(runs, weak=True)
    (row,) = weak[(weak["world"] == 2) & (weak["efficiency_percent"].round(6) == 95.0)].to_dict("records")
    assert row["speedup"] == pytest.approx(1.9)
    assert 95.0 not in set(strong["efficiency_percent"])


def test_a_run_has_the_planners_account_and_its_measurement(made):
    for name, shard in (("single", 1), ("fsdp", 2)):
        run = made.run(name, shard=shard)
        begin(run)
        train(run)
        end(run)
    made.drop("rule", "breaks a rule", parallelism="tp")
    memory = memory_frame(made.folder.path)
    assert list(memory.columns) == list(MEMORY_COLUMNS)
    assert list(memory["name"]) == ["single", "fsdp"]
    assert list(memory["measured_gib"]) == [0.75, 0.75]
    most = most_memory(from_mapping(run.config(1)))
    row = memory.iloc[1]
    assert [row[f"item.{item}"] * 1024**3 for item in ITEMS] == pytest.approx([most.items[item] for item in ITEMS])
    assert row["tensors_gib"] * 1024**3 == pytest.approx(most.allocated)
    # On a CPU the measurement is of a process, and so is the estimate.
    assert row["estimated_gib"] > 0.3
    assert row["error_percent"] == pytest.approx(100 * (row["estimated_gib"] / 0.75 - 1))


def test_runs_that_did_not_end_well_have_an_estimate_only(made):
    run = made.run("lost", shard=2)
    begin(run)
    end(run, "oom")
    made.run("waits")
    begin(run := made.run("odd", seed=1))
    end(run, metrics={"memory/max_resident(GiB)": 0.0})
    memory = memory_frame(made.folder.path)
    assert list(memory["name"]) == ["lost", "waits", "odd"]
    # Of a measurement of 0 there is no error in percent.
    assert memory["measured_gib"].fillna(-1).tolist() == [-1, -1, 0.0]
    assert memory["error_percent"].isna().all()
    assert (memory["estimated_gib"] > 0).all()


@pytest.fixture
def steps(made):
    for name, losses, keys in (
        ("single", [4.0, 2.0, 0.0, 1.0], {}),
        ("fsdp", [4.0, 2.5, 0.0, 1.0], {"shard": 2}),
        ("short", [3.0, 2.0], {"shard": 4}),
        ("nan", [4.0, math.nan, 1.0, 1.0], {"shard": 6}),
    ):
        run = made.run(name, **keys)
        begin(run)
        train(run, losses=losses)
    return frames.metrics_frame(made.folder.path)


def test_differences_are_relative_and_by_step(steps):
    reference = steps.run[0]
    frame = differences_frame(steps, reference)
    assert list(frame.columns) == list(DIFFERENCE_COLUMNS)
    assert reference not in set(frame["run"])
    of = {name: list(frame[frame["name"] == name]["loss_difference"]) for name in ("fsdp", "short", "nan")}
    assert of["fsdp"] == [0.0, 0.25, 0.0, 0.0]
    # Only steps that both have.
    assert of["short"] == [0.25, 0.0]
    # Neither a loss that is missing nor a division by zero is a difference.
    assert of["nan"][0] == of["nan"][3] == 0.0
    assert [math.isnan(value) for value in of["nan"][1:3]] == [True, True]
    assert list(frame[frame["name"] == "fsdp"]["tokens"]) == [384, 768, 1152, 1536]


def test_the_largest_difference_of_each_run(steps):
    largest = largest_differences(differences_frame(steps, steps.run[0]))
    assert list(largest["name"]) == ["fsdp", "short", "nan"]
    assert list(largest["steps"]) == [4, 2, 4]
    assert list(largest["loss_difference"]) == [0.25, 0.25, 0.0]


def test_an_unknown_reference_is_refused(steps):
    with pytest.raises(ConfigError, match="is no run of these steps; known: single-"):
        differences_frame(steps, "gone")
    with pytest.raises(ConfigError, match="no run has logged a step"):
        differences_frame(steps[:0], "gone")


def test_bubbles_are_those_of_the_formulas():
    frame = schedules_frame(ranks=(2, 4), microbatches=(8, 16)).set_index(["schedule", "ranks", "microbatches"])
    for ranks in (2, 4):
        for count in (8, 16):
            idle = 100 * (ranks - 1) / (count + ranks - 1)
            assert frame.loc[("1f1b", ranks, count), "bubble_percent"] == pytest.approx(idle)
            assert frame.loc[("gpipe", ranks, count), "bubble_percent"] == pytest.approx(idle)
            halved = 100 * (ranks - 1) / (2 * count + ranks - 1)
            assert frame.loc[("interleaved_1f1b", ranks, count), "bubble_percent"] == pytest.approx(halved)
    assert frame.loc[("gpipe", 4, 16), "peak_in_flight"] == 16
    assert frame.loc[("1f1b", 4, 16), ["peak_in_flight", "step"]].to_list() == [4, 57]
    assert set(frame.reset_index()["schedule"]) == set(schedules()) == {*discover()["schedule"]} - {"csv", None}


def test_a_schedule_has_no_row_where_it_is_not_allowed():
    frame = schedules_frame(ranks=(4,), microbatches=(3,))
    assert "dualpipe_v" not in set(frame["schedule"])
    assert "1f1b" in set(frame["schedule"])


def test_a_timeline_takes_durations_of_all_layers_of_a_rank():
    durations = {Kind.FORWARD: 2.0, Kind.BACKWARD: 4.0, Kind.INPUT: 2.0, Kind.WEIGHT: 2.0}
    usual = timeline_of("interleaved_1f1b", ranks=2, microbatches=4)
    slower = timeline_of("interleaved_1f1b", ranks=2, microbatches=4, durations=durations)
    assert slower.duration == 2 * usual.duration
    with pytest.raises(ConfigError, match="is no schedule without a file; known: 1f1b"):
        timeline_of("csv", ranks=2, microbatches=4)


def test_pipelines_of_a_sweep_are_those_that_are_done(made):
    for name, kind, keys in (
        ("pp", "done", {"pipeline": 2}),
        ("lost", "oom", {"pipeline": 2, "seed": 1}),
        ("fsdp", "done", {"shard": 2}),
    ):
        run = made.run(name, **keys)
        begin(run)
        train(run)
        end(run, kind)
    frame = pipelines_frame(made.folder.path)
    (row,) = frame.to_dict("records")
    assert (row["name"], row["ranks"], row["stages"], row["schedule"]) == ("pp", 2, 2, "1f1b")
    idle = 1 / (row["microbatches"] + 1)
    assert row["bubble_percent"] == pytest.approx(100 * idle)
    assert row["busy_seconds"] == pytest.approx(0.25 * (1 - idle))


def test_the_first_is_named_if_the_gap_is_more_than_noise(made):
    for name, shard, speeds in (("single", 1, (1000.0, 1010.0, 1005.0)), ("fsdp", 2, (500.0, 505.0, 495.0))):
        for repeat, speed in enumerate(speeds):
            run = made.run(name, shard=shard, repeat=repeat)
            begin(run, cores=8)
            train(run)
            end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed, "memory/max_resident(GiB)": shard * 0.5})
    runs = frames.sweep_frame(made.folder.path)
    sentence, *table = ranking_text(runs).splitlines()
    assert sentence.startswith("single")
    assert "more than dp_s2" in sentence
    assert sum(" 3  " in line for line in table) == 2
    assert ranking_text(runs, "memory").startswith("single")
    assert "more than" not in ranking_text(runs, max_memory_gib=0.75).splitlines()[0]

"""What planner and schedules say of the recipes of a report."""

import json

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end
from titanlab.report import panels
from titanlab.report.panels import estimated_splits, measured_splits, pipelines


def done(made, name, **given):
    begin(made_run := made.run(name, **given))
    end(made_run)
    return made_run


def windows(run_folder, *metrics):
    with (run_folder.path / "metrics.jsonl").open("a") as file:
        for step, values in enumerate(metrics, 1):
            row = {"kind": "breakdown", "step": step, "attempt": 1}
            file.write(json.dumps(row | {f"breakdown/{name}": value for name, value in values.items()}) + "\n")


def test_the_parts_of_a_step_are_those_of_the_latest_window(made):
    windows(
        first := done(made, "fsdp", shard=2),
        {"step(s)": 9.0, "forward(s)": 9.0},
        {"step(s)": 0.3, "forward(s)": 0.1, "exposed_shard(s)": 0.2, "optimizer(s)": 0.0, "data(s)": None},
    )
    done(made, "tp", tensor=2)
    (split,) = measured_splits(facts_in(made.folder))
    assert (split.run, split.label, split.is_measured) == (first.path.name, "dp_s2", True)
    assert split.seconds == {"forward": 0.1, "shard": 0.2}
    assert split.columns == ["breakdown/forward(s)", "breakdown/exposed_shard(s)"]


@pytest.mark.parametrize("value", [0, -1.0, "0.1", [0.1], {}])
def test_a_window_without_a_part_that_took_time_is_none(made, value):
    windows(done(made, "fsdp", shard=2), {"step(s)": 0.3, "forward(s)": value})
    assert measured_splits(facts_in(made.folder)) == []


def test_of_repeats_the_first_with_windows_counts(made):
    done(made, "fsdp", shard=2)
    windows(second := done(made, "fsdp", shard=2, repeat=1), {"forward(s)": 0.1})
    windows(done(made, "fsdp", shard=2, repeat=2), {"forward(s)": 0.2})
    (split,) = measured_splits(facts_in(made.folder))
    assert (split.run, split.seconds) == (second.path.name, {"forward": 0.1})


def test_the_planner_estimates_what_nobody_measured(made):
    first = done(made, "fsdp", shard=2)
    (split,) = estimated_splits(facts_in(made.folder))
    assert (split.run, split.label, split.columns, split.is_measured) == (
        *(first.path.name, "dp_s2"),
        *(["config.yaml"], False),
    )
    assert split.seconds["compute"] > 0
    assert split.seconds["shard"] >= 0


@pytest.mark.parametrize("text", ["{", "model: 3", "seed: x"])
def test_a_recipe_that_cannot_be_read_has_neither(made, text):
    made_run = done(made, "pp", pipeline=2)
    facts = facts_in(made.folder)
    assert len(facts.runs) == 1
    (made_run.path / "attempts/1/config.yaml").write_text(text)
    assert estimated_splits(facts) == []
    assert pipelines(facts) == ([], ["pp2: its config.yaml cannot be read"])


def test_without_runs_nothing_is_said():
    assert (measured_splits(facts_of()), estimated_splits(facts_of()), pipelines(facts_of())) == ([], [], ([], []))
    # Folders that are gone.
    facts = facts_of(run("a"), run("b", "tp2"))
    assert (measured_splits(facts), estimated_splits(facts), pipelines(facts)) == ([], [], ([], []))


def test_each_form_of_a_pipeline_is_drawn_once(made):
    first = done(made, "pp", pipeline=2, microbatch=3)
    done(made, "pp_bf16", pipeline=2, microbatch=3, bf16=True)
    second = done(made, "pp1", pipeline=2, microbatch=6)
    done(made, "fsdp", shard=2)
    drawn, left_out = pipelines(facts_in(made.folder))
    assert {pipeline.run for pipeline in drawn} == {first.path.name, second.path.name}
    assert {pipeline.label.partition(" · ")[0] for pipeline in drawn} == {"pp2"}
    assert sorted(pipeline.label.rpartition(" · ")[2] for pipeline in drawn) == [
        "1f1b, 2 microbatches",
        "1f1b, 4 microbatches",
    ]
    assert sorted(sum(map(len, pipeline.timeline.events)) for pipeline in drawn) == [8, 16]
    assert left_out == []


def test_a_pipeline_with_too_many_actions_is_left_out(made, monkeypatch):
    done(made, "pp", pipeline=2, microbatch=1)
    monkeypatch.setattr(panels, "MOST_CELLS", 47)
    assert pipelines(facts_in(made.folder)) == ([], ["pp2: 48 actions are too many for a page"])
    monkeypatch.setattr(panels, "MOST_CELLS", 48)
    assert len(pipelines(facts_in(made.folder))[0]) == 1


def test_without_figures_of_the_machine_a_backward_pass_takes_two_forward_passes(made, monkeypatch):
    done(made, "pp", pipeline=2, microbatch=6)
    facts = facts_in(made.folder)
    (estimated,) = pipelines(facts)[0]
    assert estimated.unit == "s, estimated"
    monkeypatch.setattr(panels, "timeline_of", lambda recipe, machine: None)
    (plain,) = pipelines(facts)[0]
    assert plain.unit == ""
    # Two microbatches through two stages: (2 + 1) forward and as many backward passes of twice the time.
    assert (plain.timeline.duration, plain.timeline.bubble_share) == (9.0, pytest.approx(1 / 3))

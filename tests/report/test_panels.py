"""The sections with a figure: captions, descriptions in words, notes, the values behind; and damaged rows."""

import dataclasses
import json

import pytest
import yaml

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end, train
from tests.sweep.table.plain import row
from titanlab.report import panels
from titanlab.report.panels import declared_memory, figure_sections, memory_text, pipelines

pytestmark = pytest.mark.usefixtures("drawn")


def section(facts, name, by="tps"):
    """The section of this name; None: there is none."""
    found = {each.id: each for each in figure_sections(dataclasses.replace(facts, by=by))}
    return found.get(name)


def shown(table):
    return [[cell.text for cell in line] for line in table.rows]


def test_memory_against_speed_is_described_in_words():
    facts = facts_of(
        run("a", "dp_s2", 1000.0, memory_gib=2.0),
        run("b", "tp2", 12.345, memory_gib=1.0),
        run("c", "cp2", 5.0, memory_gib=3.0),
        run("d", "pp2", None, outcome="oom", memory_gib=9.0),
        run("e", "pp4", None, state="running", outcome=None),
    )
    panel = section(facts, "pareto")
    assert panel.title == "Memory against speed"
    assert panel.description == (
        "Scatter of 3 recipes. Memory from 1.00 to 3.00 GiB, tokens per second of one device from 5.00 to 1,000. "
        "Not beaten in both: tp2 (12.3 at 1.00 GiB); dp_s2 (1,000 at 2.00 GiB). 1 run failed."
    )
    assert "A red cross is a run that failed" in panel.caption
    assert panel.columns == ["memory_gib", "tokens_per_second", "outcome", "estimate.memory_gib"]
    assert [line[0] for line in shown(panel.values)] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("other", "caption", "described"),
    [
        (
            run("b", "tp2", None),
            "No recipe was run more than once, so that nothing is known of the noise",
            "dp_s2 1,000.",
        ),
        (run("b", "dp_s2", 1010.0), "interval of 95 % around a recipe's mean", "dp_s2 1,005."),
    ],
)
def test_speeds_have_intervals_where_there_are_repeats(drawn, other, caption, described):
    panel = section(facts_of(run("a", "dp_s2", 1000.0), other), "throughput", by="memory")
    assert caption in panel.caption
    assert panel.description == f"Bars of tokens per second of one device. {described}"
    assert panel.notes == []
    bands = drawn["throughput_by_layout"][1]["bands"]
    assert [low < 1005 < high for low, high in bands.values()] == [True] * len(bands)
    assert bool(bands) == ("interval" in caption)


def test_of_many_recipes_the_fastest_are_drawn(drawn):
    facts = facts_of(*(run(f"r{place}", f"l{place}", 1000.0 - place) for place in range(42)))
    panel = section(facts, "throughput")
    assert panel.notes == ["The figure has the 40 fastest of 42 recipes."]
    rows = drawn["throughput_by_layout"][0][0]
    assert [each["run"] for each in rows] == [f"r{place}" for place in range(40)]
    assert panel.description.endswith("l0 1,000; l1 999; l2 998; l3 997; and 38 more.")
    assert len(panel.values.rows) == 42


def window(run_folder, at, /, **seconds):
    with run_folder.open_metrics(1) as metrics:
        metrics.write("breakdown", at, {f"breakdown/{name}(s)": value for name, value in seconds.items()})


def test_parts_of_a_step_are_measured_or_estimated_or_left_out(made, drawn):
    runs = [made.run("fsdp", shard=2), made.run("tp", tensor=2)]
    for made_run in runs:
        begin(made_run)
        train(made_run, step=2)
    panel = section(facts_in(made.folder), "step-time")
    assert panel.title == "Where the time of a step goes (estimate)"
    assert panel.caption.startswith("An estimate of the planner, and no measurement")
    assert (panel.columns, panel.notes) == (["config.yaml"], [])
    # Once a run is done, no estimate stands where people look for measurements.
    end(runs[0])
    panel = section(facts_in(made.folder), "step-time")
    assert (panel.figure, panel.title) == (None, "Where the time of a step goes")
    assert panel.texts[0].startswith("Not measured: no run has profiler=breakdown")
    end(runs[1], "crash", cause="ValueError: no")
    window(runs[0], 4, step=9.0, forward=9.0)
    # The latest one counts, and of it what took time.
    window(runs[0], 8, step=0.5, forward=0.1, exposed_shard=0.3, optimizer=0.0, data=None)
    panel = section(facts_in(made.folder), "step-time")
    assert panel.title == "Where the time of a step goes"
    assert panel.caption.startswith("Measured with profiler=breakdown")
    assert panel.description == "Stacked bars of the seconds of a step. dp_s2: exposed: shard 75 %, forward 25 %."
    assert panel.columns == ["breakdown/exposed_shard(s)", "breakdown/forward(s)"]
    assert panel.values.headings == ["run", "forward", "exposed: shard"]
    assert [line[1:] for line in shown(panel.values)] == [["0.100", "0.300"]]
    assert panel.notes == ["No bar, because figures are missing: tp2."]
    assert section(facts_of(run("gone")), "step-time").figure is None


def test_memory_is_what_runs_have_measured_beside_what_is_declared(made):
    measured, other = made.run("fsdp", shard=2), made.run("tp", tensor=2)
    for made_run in (measured, other):
        begin(made_run)
        train(made_run, step=2)
        end(made_run)
    panel = section(facts_in(made.folder), "memory")
    assert panel.title == "Memory by item (declared)"
    declared = {line[0]: line for line in shown(panel.tables[0])}
    assert [line[1] for line in declared.values()] == ["declared", "declared"]
    assert memory_text(facts_in(made.folder)).partition(":")[0].endswith(" GiB, declared")
    items = {"parameters": 1.0, "gradients": 1.5, "optimizer_state": 2.0, "rest": 4.0}
    with measured.open_metrics(1) as metrics:
        metrics.write("memory_by_item", 8, {f"memory_by_item/{name}(GiB)": size for name, size in items.items()})
    panel = section(facts_in(made.folder), "memory")
    assert panel.title == "Memory by item"
    lines = {(line[0], line[1]): line for line in shown(panel.tables[0])}
    assert list(lines) == [("dp_s2", "measured"), ("dp_s2", "declared"), ("tp2", "declared")]
    headings = list(panel.tables[0].headings)
    own = dict(zip(headings, lines["dp_s2", "measured"], strict=True))
    assert [own[item] for item in ("parameters", "gradients", "optimizer state", "rest")] == [
        "1.000",
        "1.500",
        "2.000",
        "4.000",
    ]
    assert dict(zip(headings, lines["dp_s2", "declared"], strict=True))["activations"] != ""
    assert {mark.runs for mark in panel.figure.marks.values()} == {(measured.path.name,)}
    assert panel.notes == ["No bar, because figures are missing: tp2."]
    assert (
        memory_text(facts_in(made.folder))
        == "8.50 GiB: parameters 1.00, gradients 1.50, optimizer state 2.00, rest 4.00"
    )


def test_one_run_of_each_recipe_has_a_curve(made, drawn):
    runs = []
    for repeat in range(2):
        begin(made_run := made.run("fsdp", shard=2, repeat=repeat))
        train(made_run, losses=[5.0, 4.0])
        end(made_run, metrics={"loss_metrics/global_avg_loss": 4.0})
        runs.append(made_run.path.name)
    made.run("waits", seed=3, tensor=2)
    panel = section(facts_in(made.folder), "loss")
    first = runs[0]
    (steps,), more = drawn["loss_by_tokens"]
    assert [(step["run"], step["step"]) for step in steps] == [(first, 1), (first, 2)]
    assert more["labels"] == {first: "dp_s2"}
    assert panel.description == f"Lines of the training loss of 1 run. Last loss: {first} 4.0000."
    assert panel.notes == ["One run of each recipe is drawn, 14 at most; 2 runs more are in the table."]


def test_runs_that_diverged_are_drawn_first_and_told_apart(drawn, monkeypatch):
    facts = facts_of(
        run("good", loss=4.0, repeat=0),
        run("bad", outcome="nan", loss=None, repeat=1),
        run("other", "tp2", loss=3.0, repeat=0),
    )
    monkeypatch.setattr(type(facts), "metrics", lambda self, row, kind: [{"step": 1}])
    panel = section(facts, "loss")
    (steps,), more = drawn["loss_by_tokens"]
    assert [step["run"] for step in steps] == ["bad", "good", "other"]
    assert more["labels"] == {"bad": "dp_s2 · repeat 1", "good": "dp_s2 · repeat 0", "other": "tp2"}
    assert panel.description.endswith("Last loss: good 4.0000; other 3.0000.")
    assert panel.notes == []


def test_pipelines_are_told_with_their_bubbles(made):
    begin(made_run := made.run("pp", pipeline=2, microbatch=6))
    end(made_run)
    panel = section(facts_in(made.folder), "timeline")
    assert panel.caption.endswith("Durations are the planner's estimates.")
    assert panel.description.startswith("Timelines of 1 pipeline. pp2 · 1f1b, 2 microbatches: idle ")
    assert panel.values.headings == [
        *("run", "schedule", "layout.pipeline", "microbatch", "idle, of all ranks' time"),
        "most microbatches in flight, by rank",
    ]
    ((name, schedule, ranks, microbatch, bubble, peaks),) = shown(panel.values)
    assert (name, schedule, ranks, microbatch, peaks) == (made_run.path.name, "1f1b", "2", "6", "2, 1")
    assert panel.description.endswith(f"idle {bubble} of all ranks' time.")
    assert section(facts_of(run("a")), "timeline").figure is None


def test_estimates_are_held_against_measurements():
    column = {"step_seconds": 1.0, "estimate.step_seconds": 1.1}
    facts = facts_of(
        run("a", **column),
        run("b", **{**column, "estimate.step_seconds": 1.5}),
        run("c", step_seconds=1.0),
        run("d", outcome="oom", **column),
    )
    panel = section(facts, "estimate")
    assert panel.description == (
        "Scatter of estimates and measurements. time of a step: 1 of 2 runs within 20 %, worst 50 %."
    )
    assert [line[0] for line in shown(panel.values)] == ["a", "b"]
    assert (
        section(facts_of(run("a", step_seconds=1.0), row(**{"estimate.step_seconds": 1.0})), "estimate").figure is None
    )


def done(made, name, **given):
    begin(made_run := made.run(name, **given))
    end(made_run)
    return made_run


@pytest.mark.parametrize("text", ["{", "model: 3", "seed: x"])
def test_a_recipe_that_cannot_be_read_has_neither(made, text):
    made_run = done(made, "pp", pipeline=2)
    facts = facts_in(made.folder)
    assert len(facts.runs) == 1
    (made_run.path / "attempts/1/config.yaml").write_text(text)
    assert declared_memory(facts) == []
    assert pipelines(facts) == ([], ["pp2: its config.yaml cannot be read"])


@pytest.mark.parametrize("degrees", [{"shard": 0}, {"pipeline": -1}])
def test_a_pipeline_of_impossible_degrees_is_left_out(made, degrees):
    made_run = done(made, "pp", pipeline=2)
    facts = facts_in(made.folder)
    file = made_run.path / "attempts/1/config.yaml"
    recipe = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**recipe, "parallelism": {**recipe["parallelism"], **degrees}}))
    drawn, (line,) = pipelines(facts)
    assert drawn == []
    assert line.startswith("pp2: ")


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


EVEN = [[10, 10, 10, 10], [10, 10, 10, 10]]
SKEWED = [[40, 0, 0, 0], [5, 15, 10, 10]]


def run_of(made, name, *rows, **given):
    run = made.run(name, **given)
    begin(run)
    train(run)
    with (run.path / "metrics.jsonl").open("a") as file:
        for step, counts in rows:
            file.write(json.dumps({"kind": "experts", "step": step, "attempt": 1, "steps": 2, "counts": counts}) + "\n")
    end(run)
    return run


def experts(made):
    made.write()
    return section(facts_in(made.folder), "experts")


def test_the_newest_row_of_each_recipe_is_drawn_and_equal_ones_once(made):
    first = run_of(made, "fsdp", (2, SKEWED), (4, EVEN), shard=2)
    second = run_of(made, "tp", (4, EVEN), tensor=2)
    run_of(made, "single", (4, SKEWED))
    panel = experts(made)
    assert panel is not None
    marks = list(panel.figure.marks.values())
    assert len(marks) == 2
    equal = next(mark for mark in marks if len(mark.runs) == 2)
    assert {*equal.runs} == {first.path.name, second.path.name}
    assert "and 1 recipe with the same counts, steps 3 to 4: at most 1.00 of an equal share" in equal.text
    (skewed,) = (mark for mark in marks if mark is not equal)
    assert "at most 4.00 of an equal share (block 0, expert 0), at least 0.00 (block 0, expert 1)" in skewed.text
    assert "3 experts without a token" in skewed.text
    assert "3 experts without a token" in panel.description
    # A row for each block of each map.
    assert len(panel.values.rows) == 4
    assert [cell.text for cell in panel.values.rows[-2]][-5:] == ["0", "4.000", "1", "0.000", "3"]


@pytest.mark.parametrize(
    "counts",
    [None, [[]], [[1, 2], [3]], [[1, -1]], [[1e308, 1e308]], [{"a": 1}]],
)
def test_counts_that_no_run_writes_are_passed_over(made, counts):
    run = run_of(made, "fsdp", (4, counts), shard=2)
    assert run.metrics("experts")
    assert experts(made) is None

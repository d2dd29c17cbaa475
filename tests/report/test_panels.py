"""The figures of a report: their captions, descriptions in words, notes, and the values behind them."""

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end, train
from tests.sweep.table.plain import row
from titanlab.report import panels
from titanlab.report.facts import answer_of
from titanlab.report.figures import bars, over_time, scatter


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Figures take longer than all else, and have tests of their own: here it is what they are given that counts."""
    given = {}
    for module, name in (
        (scatter, "pareto"),
        (scatter, "estimate_against_measurement"),
        (bars, "throughput_by_layout"),
        (bars, "step_time_split"),
        (over_time, "loss_by_tokens"),
        (over_time, "pipeline_timelines"),
    ):
        monkeypatch.setattr(module, name, lambda *values, name=name, **more: given.setdefault(name, (values, more)))
    return given


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
    panel = panels.pareto_panel(facts, speed="tokens_per_second")
    assert (panel.name, panel.title) == ("pareto", "Memory against speed")
    assert panel.description == (
        "Scatter of 3 recipes. Memory from 1.00 to 3.00 GiB, tokens per second of one device from 5.00 to 1,000. "
        "Not beaten in both: tp2 (12.3 at 1.00 GiB); dp_s2 (1,000 at 2.00 GiB). 1 run failed."
    )
    assert "A red cross is a run that failed" in panel.caption
    assert panel.columns == ["memory_gib", "tokens_per_second", "outcome", "estimate.memory_gib"]
    assert [line[0] for line in shown(panel.values)] == ["a", "b", "c", "d", "e"]


def test_memory_against_speed_of_nothing():
    panel = panels.pareto_panel(facts_of(), speed="mfu_percent")
    assert (panel.title, panel.description) == ("Memory against MFU", "Scatter of 0 recipes.")
    assert panel.columns == ["memory_gib", "mfu_percent", "outcome"]
    assert "red cross" not in panel.caption
    assert shown(panel.values) == []


@pytest.mark.parametrize("oversubscribed", [True, False])
def test_runs_that_took_turns_are_explained(oversubscribed):
    facts = facts_of(run("a", oversubscribed=oversubscribed))
    for panel in (
        panels.pareto_panel(facts, speed="tokens_per_second"),
        panels.throughput_panel(facts, answer_of(facts, by="tps")),
    ):
        assert ("more processes than cores, which took turns" in panel.caption) is oversubscribed


def test_speeds_without_repeats_say_nothing_of_noise(drawn):
    facts = facts_of(run("a", "dp_s2", 1000.0), run("b", "tp2", None))
    panel = panels.throughput_panel(facts, answer_of(facts, by="tps"))
    assert panel.description == "Bars of tokens per second of one device. dp_s2 1,000."
    assert panel.caption.endswith(
        "No recipe was run more than once, so that nothing is known of the noise between runs."
    )
    assert panel.notes == []
    assert drawn["throughput_by_layout"][1]["bands"] == {}


def test_speeds_with_repeats_have_intervals(drawn):
    facts = facts_of(run("a", "dp_s2", 1000.0), run("b", "dp_s2", 1010.0))
    panel = panels.throughput_panel(facts, answer_of(facts, by="memory"))
    assert "interval of 95 % around a recipe's mean" in panel.caption
    low, high = drawn["throughput_by_layout"][1]["bands"]["dp_s2"]
    assert low < 1005 < high


def test_of_many_recipes_the_fastest_are_drawn(drawn):
    facts = facts_of(*(run(f"r{place}", f"l{place}", 1000.0 - place) for place in range(42)))
    panel = panels.throughput_panel(facts, answer_of(facts, by="tps"))
    assert panel.notes == ["The figure has the 40 fastest of 42 recipes."]
    rows = drawn["throughput_by_layout"][0][0]
    assert [each["run"] for each in rows] == [f"r{place}" for place in range(40)]
    assert panel.description.endswith("l0 1,000; l1 999; l2 998; l3 997; and 38 more.")
    assert len(panel.values.rows) == 42


def test_without_a_measured_run_there_are_no_speeds():
    facts = facts_of(run("a", speed=None))
    panel = panels.throughput_panel(facts, answer_of(facts, by="tps"))
    assert panel.description == "Bars of tokens per second of one device. No run was measured."


def windows(run_folder, **seconds):
    with run_folder.open_metrics(1) as metrics:
        metrics.write("breakdown", 8, {f"breakdown/{name}(s)": value for name, value in seconds.items()})


def test_parts_of_a_step_are_measured_or_estimated_or_left_out(made, drawn):
    runs = [made.run("fsdp", shard=2), made.run("tp", tensor=2)]
    for made_run in runs:
        begin(made_run)
        train(made_run, step=2)
        end(made_run)
    panel = panels.split_panel(facts_in(made.folder))
    assert panel.title == "Where the time of a step goes (estimate)"
    assert panel.caption.startswith("An estimate of the planner, and no measurement")
    assert (panel.columns, panel.notes) == (["config.yaml"], [])
    windows(runs[0], forward=0.1, exposed_shard=0.3)
    panel = panels.split_panel(facts_in(made.folder))
    assert panel.title == "Where the time of a step goes"
    assert panel.caption.startswith("Measured with profiler=breakdown")
    assert panel.description == "Stacked bars of the seconds of a step. dp_s2: exposed: shard 75 %, forward 25 %."
    assert panel.columns == ["breakdown/exposed_shard(s)", "breakdown/forward(s)"]
    assert panel.values.headings == ["run", "forward", "exposed: shard"]
    assert [line[1:] for line in shown(panel.values)] == [["0.100", "0.300"]]
    assert panel.notes == ["Without a bar, for lack of figures: tp2."]
    assert panels.split_panel(facts_of(run("gone"))) is None


def test_one_run_of_each_recipe_has_a_curve(made, drawn):
    runs = []
    for repeat in range(2):
        begin(made_run := made.run("fsdp", shard=2, repeat=repeat))
        train(made_run, losses=[5.0, 4.0])
        end(made_run, metrics={"loss_metrics/global_avg_loss": 4.0})
        runs.append(made_run.path.name)
    made.run("waits", seed=3, tensor=2)
    panel = panels.loss_panel(facts_in(made.folder))
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
    panel = panels.loss_panel(facts)
    (steps,), more = drawn["loss_by_tokens"]
    assert [step["run"] for step in steps] == ["bad", "good", "other"]
    assert more["labels"] == {"bad": "dp_s2 · repeat 1", "good": "dp_s2 · repeat 0", "other": "tp2"}
    assert panel.description.endswith("Last loss: good 4.0000; other 3.0000.")
    assert panel.notes == []


def test_without_a_step_there_is_no_curve():
    panel = panels.loss_panel(facts_of(run("a", step=0)))
    assert panel.description == "Lines of the training loss of 0 runs. Last loss: none."
    assert panel.notes == []


def test_pipelines_are_told_with_their_bubbles(made):
    begin(made_run := made.run("pp", pipeline=2, microbatch=6))
    end(made_run)
    panel = panels.timeline_panel(facts_in(made.folder))
    assert panel.caption.endswith("Durations are the planner's estimates.")
    assert panel.description.startswith("Timelines of 1 pipeline. pp2 · 1f1b, 2 microbatches: idle ")
    assert panel.values.headings == [
        *("run", "schedule", "layout.pipeline", "microbatch", "idle, of all ranks' time"),
        "most microbatches in flight, by rank",
    ]
    ((name, schedule, ranks, microbatch, bubble, peaks),) = shown(panel.values)
    assert (name, schedule, ranks, microbatch, peaks) == (made_run.path.name, "1f1b", "2", "6", "2, 1")
    assert panel.description.endswith(f"idle {bubble} of all ranks' time.")
    assert panels.timeline_panel(facts_of(run("a"))) is None


def test_estimates_are_held_against_measurements():
    column = {"step_seconds": 1.0, "estimate.step_seconds": 1.1}
    facts = facts_of(
        run("a", **column),
        run("b", **{**column, "estimate.step_seconds": 1.5}),
        run("c", step_seconds=1.0),
        run("d", outcome="oom", **column),
    )
    panel = panels.estimate_panel(facts)
    assert panel.description == (
        "Scatter of estimates and measurements. time of a step: 1 of 2 runs within 20 %, worst 50 %."
    )
    assert [line[0] for line in shown(panel.values)] == ["a", "b"]
    assert panels.estimate_panel(facts_of(run("a", step_seconds=1.0), row(**{"estimate.step_seconds": 1.0}))) is None

"""What wandb has of a run of a sweep, by which its dashboards compare recipes: read from the file of a real training."""

from dataclasses import replace

import pytest

from tests import tiny
from tests.report.test_wandb_workspace import keys_of
from tests.tracker.test_wandb import inspect
from titanlab.costs import meter
from titanlab.recipe import to_mapping
from titanlab.records import create_run, identify
from titanlab.report.wandb_workspace import json_text, view_of
from titanlab.sweep import SweepFolder
from titanlab.techniques.tracker.trackers_schema import JsonlTracker, Wandb


@pytest.fixture
def prepared(tmp_path):
    """A recipe over two ranks and the run of a sweep's point that it is."""
    tracker = Wandb(mode="offline", finish_seconds=120)
    recipe = replace(tiny.recipe(tmp_path / "runs", shard=2, steps=8), tracker=tracker, name="fsdp", sweep="layouts")
    identity = identify(recipe, data="tiny", hardware="cpu", repeat=0)
    run = create_run(recipe.runs, sweep="layouts", name="fsdp", identity=identity, config=to_mapping(recipe))
    point = {"parallelism": "fsdp", "training.microbatch": None}
    lines = [{"point": {}, "run": "other"}, {"point": point, "repeat": 0, "run": run.path.name, "dropped": None}]
    SweepFolder(run.path.parent).write_manifest({"name": "layouts"}, lines)
    return recipe, run


def test_runs_of_a_sweep_can_be_grouped_filtered_and_compared(pool, prepared):
    recipe, run = prepared
    run = tiny.begin(recipe, run)
    pool.run(2, tiny.as_rank, recipe, run)
    records = inspect(run.path)
    opened = next(record["run"] for record in records if record["type"] == "run")
    assert (opened["run_group"], opened["display_name"]) == ("layouts", run.path.name)
    config = opened["config"]["update"]
    degrees = {f"layout.{axis}": degree for axis, degree in recipe.layout.degrees().items()}
    assert {key: config[key] for key in degrees} == degrees
    assert (config["layout.label"], config["world"]) == ("dp_s2", 2)
    assert config["point.parallelism"] == "fsdp"
    assert config.get("point.training.microbatch") is None
    # The panels of `titanlab workspace` read what is here: a step into a mapping is `.value.` to wandb.
    read = keys_of(json_text(view_of("layouts", [], tracker={}, project=None, entity=None)))
    for key in read["config"]:
        mapping, _, name = key.removesuffix(".value").partition(".value.")
        assert not name or config[mapping][name] == config[f"{mapping}.{name}"], key
        assert mapping in config
    logged = {key for record in records if record["type"] == "history" for key in record["history"]["item"]}
    assert read["rows"] <= logged | {meter.VALIDATION_LOSS}

    summary = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    assert read["summary"] <= {*summary, meter.MFU}
    result = run.result()
    assert summary["outcome"] == "done"
    medians = (meter.TOKENS_PER_SECOND, meter.TFLOPS, meter.MFU, meter.STEP_SECONDS, meter.MEASURED_STEPS, meter.LOSS)
    for name in (*medians, "first_loss", "memory/max_resident(GiB)"):
        assert summary[name] == result.metrics[name], name
    # It counts the steps after warm-up; wandb would take the last row's value.
    assert summary[meter.MEASURED_STEPS] == 8 - recipe.training.unmeasured_steps


class FailsAt(tiny.story.Observer):
    """Raises with the gradients of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def with_gradients(self, step, model):
        if step == self.step:
            raise ValueError("planted")


def test_a_tracker_gets_the_outcome_and_the_medians_of_a_run_that_fails(tmp_path, monkeypatch):
    finished = []
    monkeypatch.setattr(
        JsonlTracker, "finish", lambda self, summary, *, exit_code=0: finished.append((summary, exit_code))
    )
    recipe = tiny.recipe(tmp_path, steps=8)
    with pytest.raises(ValueError, match="planted"):
        fails_at_step(recipe, tiny.begin(recipe), 6)
    ((summary, exit_code),) = finished
    assert (summary["outcome"], exit_code) == ("crash", 1)
    assert summary[meter.MEASURED_STEPS] == 6 - 1 - recipe.training.unmeasured_steps
    assert summary[meter.TOKENS_PER_SECOND] > 0


def fails_at_step(recipe, run, step):
    return tiny.as_rank(recipe, run, FailsAt(step))

"""Frames of a project of wandb are those of the runs' folders, as far as wandb knows them."""

from __future__ import annotations

import pandas as pd
import pytest

from tests import tiny
from tests.report import wandb_api
from tests.sweep.made import SUMMARY
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.recipe import to_mapping
from titanlab.report import figures, frames, wandb_frames
from titanlab.report.wandb_frames import WandbRun


def recorded(folder, name, *, exit_code=0, summary=None, **keys):
    rows = [
        {
            "_step": step,
            "_timestamp": 100.0 + step,
            meter.LOSS: 5.0 - step,
            meter.TOKENS_SEEN: 384 * step,
            "traffic/x": 1,
        }
        for step in (1, 2)
    ]
    rows[1]["validation_metrics/loss"] = 2.5
    return WandbRun(
        name=f"{name}-abcd1111",
        group="layouts",
        config={**to_mapping(tiny.recipe(folder, **keys)), "attempt": 1, "point.parallelism": name, "point.world": 2},
        rows=[{**row, "attempt": 1} for row in rows],
        summary={**SUMMARY, meter.STEP_SECONDS_MEDIAN: 9.0, "outcome": "done"} if summary is None else summary,
        exit_code=exit_code,
        cores=2,
    )


def test_a_row_has_the_columns_of_a_sweep(tmp_path, made):
    made.run("fsdp", shard=2)
    runs = wandb_frames.sweep_frame([recorded(tmp_path, "fsdp", shard=2)])
    of_folders = frames.sweep_frame(made.folder.path)
    assert list(runs.columns)[: len(of_folders.columns) - 1] == list(of_folders.columns)[:-1]
    assert (runs.dtypes[of_folders.columns] == of_folders.dtypes).all()
    (row,) = runs.to_dict("records")
    assert (row["sweep"], row["run"], row["name"], row["hash8"]) == ("layouts", "fsdp-abcd1111", "fsdp", "abcd1111")
    assert (row["layout.label"], row["world"], row["state"], row["outcome"]) == ("dp_s2", 2, "ended", "done")
    assert (row["tokens_per_second"], row["tokens_per_second_all"], row["mfu_percent"]) == (1000.0, 2000.0, 41.5)
    # The median of the result, and not that of the last row.
    assert (row["step_seconds"], row["memory_gib"], row["loss"]) == (0.25, 0.75, 4.25)
    assert (row["cores"], row["oversubscribed"], row["step"]) == (2, False, 2)
    assert (row["point.parallelism"], row["point.world"]) == ("fsdp", "2")
    assert figures.throughput_by_layout(runs).axes[0].patches


def test_a_run_that_has_not_ended_has_no_outcome(tmp_path):
    running = recorded(tmp_path, "running", exit_code=None, summary={meter.TOKENS_PER_SECOND: 900.0})
    crashed = recorded(tmp_path, "crashed", exit_code=1, summary={})
    first, second = wandb_frames.sweep_frame([running, crashed]).sort_values("run", ascending=False).to_dict("records")
    assert (first["state"], pd.isna(first["outcome"]), first["tokens_per_second"]) == ("running", True, 900.0)
    assert (second["state"], second["outcome"], second["oversubscribed"]) == ("ended", "crash", False)


def test_rows_of_steps_have_the_names_of_metrics(tmp_path):
    runs = [recorded(tmp_path, "fsdp", shard=2)]
    steps = wandb_frames.metrics_frame(runs)
    assert list(steps.columns)[:5] == ["run", "name", "layout.label", "point.parallelism", "point.world"]
    assert set(steps.columns[5:]) == {"kind", "step", "time", "attempt", meter.LOSS, meter.TOKENS_SEEN}
    assert list(steps[meter.LOSS]) == [4.0, 3.0]
    (validation,) = wandb_frames.metrics_frame(runs, "validation").to_dict("records")
    assert (validation["step"], validation["time"], validation[meter.VALIDATION_LOSS]) == (2, 102.0, 2.5)
    assert meter.LOSS not in validation
    assert figures.loss_by_tokens(steps).axes[0].lines


def test_a_run_without_a_step_has_no_rows(tmp_path):
    runs = [WandbRun(name="toy-abcd1111", config=to_mapping(tiny.recipe(tmp_path)))]
    assert wandb_frames.metrics_frame(runs).empty
    assert list(wandb_frames.sweep_frame(runs).step) == [0]


def test_runs_of_other_programs_are_left_out(tmp_path):
    ours, other = recorded(tmp_path, "fsdp", shard=2), WandbRun(name="other", config={"lr": 1.0, "training": 3})
    assert list(wandb_frames.sweep_frame([ours, other]).name) == ["fsdp"]
    with pytest.raises(ConfigError, match="has runs, and none is one of titanlab"):
        wandb_frames.sweep_frame([other])
    with pytest.raises(ConfigError, match="is not a kind of row"):
        wandb_frames.metrics_frame([ours], "traffic")


def test_runs_are_read_from_a_project(tmp_path, monkeypatch):
    rows = [{"_step": 1, "loss": 4.0}]
    known = {"name": "toy-abcd1111", "config": {"attempt": 2}, "rows": rows, "summary": {"loss": 2.0}}
    ended = {**known, "group": "layouts", "state": "crashed", "metadata": {"cpu_count_logical": 8}}
    running = {**known, "group": None, "state": "running", "metadata": None}
    monkeypatch.setattr(wandb_api.Api, "projects", {"us/titanlab": [ended, running]})
    monkeypatch.setattr(wandb_api.Api, "asked", [])
    monkeypatch.setattr("wandb.Api", wandb_api.Api)
    first, second = wandb_frames.runs_of_project("us/titanlab")
    assert first.rows == [{"_step": 1, "loss": 4.0, "attempt": 2}]
    assert (first.exit_code, first.group, first.cores) == (1, "layouts", 8)
    assert (second.exit_code, second.group, second.cores) == (None, "", None)
    assert wandb_frames.runs_of_project("us/titanlab", "layouts") == [first]
    assert wandb_api.Api.asked == [("us/titanlab", {}), ("us/titanlab", {"group": "layouts"})]

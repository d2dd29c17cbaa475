"""Frames of wandb's files are those of the runs' folders, as far as wandb knows them."""

from __future__ import annotations

import pandas as pd
import pytest

from tests import tiny
from tests.sweep.made import SUMMARY
from tests.tracker.wandb_file import write_run
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import to_mapping
from titanlab.report import figures, frames, wandb_frames


def recorded(folder, name, *, exit_code=0, summary=None, **keys):
    config = {**to_mapping(tiny.recipe(folder, **keys)), "attempt": 1, "point.parallelism": name, "point.world": 2}
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
    write_run(
        folder / f"offline-run-20260101_000000-{name}" / f"run-{name}.wandb",
        id=name,
        name=f"{name}-abcd1111",
        config=config,
        rows=rows,
        summary={**SUMMARY, meter.STEP_SECONDS_MEDIAN: 9.0, "outcome": "done"} if summary is None else summary,
        exit_code=exit_code,
    )


def test_a_row_has_the_columns_of_a_sweep(tmp_path, made):
    recorded(tmp_path / "wandb", "fsdp", shard=2)
    made.run("fsdp", shard=2)
    runs, of_folders = wandb_frames.sweep_frame(tmp_path / "wandb"), frames.sweep_frame(made.folder.path)
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


def test_a_run_that_was_killed_has_no_outcome(tmp_path):
    recorded(tmp_path, "killed", exit_code=None, summary={meter.TOKENS_PER_SECOND: 900.0})
    recorded(tmp_path, "crashed", exit_code=1, summary={})
    first, second = wandb_frames.sweep_frame(tmp_path).sort_values("run", ascending=False).to_dict("records")
    assert (first["state"], pd.isna(first["outcome"]), first["tokens_per_second"]) == ("running", True, 900.0)
    assert (second["state"], second["outcome"], second["oversubscribed"]) == ("ended", "crash", False)


def test_rows_of_steps_have_the_names_of_metrics(tmp_path):
    recorded(tmp_path, "fsdp", shard=2)
    steps = wandb_frames.metrics_frame(tmp_path)
    assert list(steps.columns)[:5] == ["run", "name", "layout.label", "point.parallelism", "point.world"]
    assert set(steps.columns[5:]) == {"kind", "step", "time", "attempt", meter.LOSS, meter.TOKENS_SEEN}
    assert list(steps[meter.LOSS]) == [4.0, 3.0]
    (validation,) = wandb_frames.metrics_frame(tmp_path, "validation").to_dict("records")
    assert (validation["step"], validation["time"], validation[meter.VALIDATION_LOSS]) == (2, 102.0, 2.5)
    assert meter.LOSS not in validation
    assert figures.loss_by_tokens(steps).axes[0].lines


def test_a_run_without_a_step_has_no_rows(tmp_path):
    write_run(tmp_path / "run-a.wandb", config=to_mapping(tiny.recipe(tmp_path)), exit_code=None)
    assert wandb_frames.metrics_frame(tmp_path).empty
    assert list(wandb_frames.sweep_frame(tmp_path).step) == [0]


def test_runs_of_other_programs_are_left_out(tmp_path):
    recorded(tmp_path, "fsdp", shard=2)
    write_run(tmp_path / "run-other.wandb", id="other", config={"lr": 1.0, "training": 3})
    assert list(wandb_frames.sweep_frame(tmp_path).name) == ["fsdp"]
    with pytest.raises(ConfigError, match="has runs, and none is one of titanlab"):
        wandb_frames.sweep_frame(tmp_path / "run-other.wandb")
    with pytest.raises(ConfigError, match="is no kind of row"):
        wandb_frames.metrics_frame(tmp_path, "traffic")

"""The planner's estimate beside a run's figures."""

import dataclasses

import pytest

from tests import tiny
from tests.sweep.made import begin, end
from titanlab.plan import machine_of
from titanlab.plan.step_time import step_time
from titanlab.recipe import Cluster
from titanlab.sweep import SweepTable
from titanlab.sweep.rows import estimate_columns, estimate_values

H100 = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")


def recipe(tmp_path, **given):
    return dataclasses.replace(tiny.recipe(tmp_path, shard=2), cluster=H100, **given)


def test_an_estimate_has_figures_of_one_device(tmp_path):
    made = recipe(tmp_path)
    values = estimate_values(made)
    assert values["note"] is None
    assert values["step_seconds"] == pytest.approx(step_time(made, machine_of(made)).seconds)
    assert values["tokens_per_second"] == pytest.approx(made.tokens_per_step / values["step_seconds"] / 2)
    assert 0 < values["memory_gib"] < 80


def test_without_an_estimate_the_reason_is_there(tmp_path):
    values = estimate_values(tiny.recipe(tmp_path))
    assert (values["step_seconds"], values["memory_gib"]) == (None, None)
    assert "CPUs were not measured" in values["note"]
    unknown = dataclasses.replace(recipe(tmp_path), cluster=Cluster(accelerator="cuda", device="Abacus 9"))
    assert "cluster.device=Abacus 9: nothing is known of its speed" in estimate_values(unknown)["note"]


def test_an_estimate_of_another_layout_is_not_shown():
    kept = {"layout": "dp_s2", "step_seconds": 1.0, "tokens_per_second": 2.0, "memory_gib": 3.0, "note": None}
    assert estimate_columns(kept, "dp_s2")["estimate.memory_gib"] == 3.0
    (said,) = estimate_columns(kept, "tp2").values()
    assert "dp_s2" in said
    assert estimate_columns("damaged", "tp2") == {}


def test_equal_recipes_are_estimated_once_and_a_damaged_one_says_so(made, monkeypatch):
    asked = []
    monkeypatch.setattr("titanlab.sweep.rows.estimate_values", lambda recipe: asked.append(recipe) or {"note": "made"})
    for seed in range(3):
        begin(made.run(f"a{seed}", seed=seed))
    begin(other := made.run("b", seed=9))
    config = other.attempt_folder(1) / "config.yaml"
    config.write_text(config.read_text().replace("max_grad_norm:", "most:"))
    rows = SweepTable(made.folder, estimates=True).rows()
    assert [row["estimate.note"] for row in rows[:3]] == ["made"] * 3
    assert "cannot be read" in rows[3]["estimate.note"]
    assert len(asked) == 1


def test_a_row_has_the_estimate_that_was_kept_or_a_late_one(made):
    run = made.run("a", shard=2)
    begin(run)
    end(run)
    made.points[0]["estimate"] = {"layout": "dp_s2", "step_seconds": 0.5, "tokens_per_second": 7.0, "memory_gib": 2.0}
    made.write()
    (row,) = SweepTable(made.folder).rows()
    assert (row["estimate.step_seconds"], row["estimate.tokens_per_second"], row["estimate.memory_gib"]) == (
        0.5,
        7.0,
        2.0,
    )
    del made.points[0]["estimate"]
    made.write()
    (row,) = SweepTable(made.folder).rows()
    assert row["estimate.note"] is None
    (row,) = SweepTable(made.folder, estimates=True).rows()
    assert "CPUs were not measured" in row["estimate.note"]

"""The page about the planner's accuracy is what its script writes from the kept results, and these are the planner's."""

from __future__ import annotations

import json
import math

import pytest

from tests.benchmarks.scripts import BENCHMARKS, script
from titanlab.plan import machine_of
from titanlab.plan.machine import Efficiencies, fitted
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time


@pytest.fixture(scope="module")
def runs():
    return script("published_runs")


@pytest.fixture(scope="module")
def pages(runs):
    return script("planner_predictions")


@pytest.fixture(scope="module")
def fit():
    return json.loads((BENCHMARKS / "results" / "planner_fit.json").read_text())


def test_the_page_is_in_step(pages, fit):
    cases = json.loads(pages.RESULT.read_text())["cases"]
    assert pages.PAGE.read_text() == pages.page(fit, cases)


@pytest.mark.full
def test_predictions_are_those_of_the_planner(pages):
    assert pages.predictions() == json.loads(pages.RESULT.read_text())["cases"]


def test_kept_values_are_the_planners(fit):
    assert Efficiencies(**fit["efficiencies"]) == fitted()


def test_kept_errors_are_those_of_the_planner(runs, fit):
    """Every eighth row: an estimate of all takes seconds."""
    kept = {row["id"]: row for row in fit["rows"]}
    published = runs.published_runs()
    assert list(kept) == [run.number for run in published]
    for run in published[::8]:
        found = step_time(run.recipe, machine_of(run.recipe), pipeline=simulated_time).tokens_per_second
        # The kept values have four digits.
        assert found / run.tokens_per_second - 1 == pytest.approx(kept[run.number]["error"], abs=2e-3)


def test_recipes_have_the_layouts_and_sizes_of_the_rows(runs):
    for run in runs.published_runs():
        row, recipe = run.row, run.recipe
        assert math.prod(recipe.layout.degrees().values()) == int(row["gpus"])
        if row["global_batch_seqs"]:
            assert recipe.training.global_batch == int(float(row["global_batch_seqs"])), row["id"]
        parameters = recipe.model.account().parameter_count / 1e9
        # GPT shares one table between embedding and head, which no pipeline of titanlab can.
        if row["params_b"] and run.fsdp:
            assert parameters == pytest.approx(float(row["params_b"]), rel=0.03), row["id"]

"""The plan of a submission: a line for each run, what it takes together, and what can be done about runs that ended."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from tests.sweep.studies import SLURM, seeds, study
from titanlab.plan.explanation import Estimate
from titanlab.sweep import decide, plan_lines, plan_values, submit
from titanlab.techniques.tracker.trackers_schema import Wandb


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """`planned(points, …)`: a study of Slurm jobs in the folder `runs` here, and the decisions on its runs."""
    monkeypatch.chdir(tmp_path)

    def plan(points, **given):
        found = study(tmp_path / "runs", points, launch=given.pop("launch", SLURM), **given)
        return found, list(decide(found, states={}, answered=False))

    return plan


def estimate(**given):
    return Estimate(
        **{"hours": 1.5, "reserved_bytes": 2_000_000_000, "limit_bytes": None, "checkpoint_bytes": 5, **given}
    )


def test_what_is_submitted_is_summed(planned):
    lines = plan_lines(*planned([{"shard": 1}, {"shard": 2}, {"shard": 6}]), answered=False)
    assert lines[0] == "layouts: 3 runs (sweeps/layouts)"
    assert "3 to submit" in lines
    assert lines[-1] == "3 jobs: 9 processes in all, 4 nodes, 3 arrays; the largest has 6"


def test_runs_of_this_host_have_no_nodes(planned):
    lines = plan_lines(*planned(seeds(2), launch=None))
    assert lines[-1] == "2 jobs: 2 processes in all; the largest has 1"


@pytest.mark.parametrize(
    ("given", "cells"),
    [
        ({}, ("1.5", "2.0", "5e-09")),
        ({"hours": 0.0}, ("0", "2.0", "5e-09")),
        ({"hours": 999.7}, ("1,000", "2.0", "5e-09")),
        ({"hours": 12345.6}, ("12,346", "2.0", "5e-09")),
        ({"checkpoint_bytes": 4_860_000_000_000}, ("1.5", "2.0", "4,860")),
        ({"checkpoint_bytes": 999_900_000_000}, ("1.5", "2.0", "1,000")),
        ({"limit_bytes": 1e9}, ("1.5", "2.0 too much", "5e-09")),
        ({"limit_bytes": 2e9}, ("1.5", "2.0", "5e-09")),
    ],
)
def test_estimates_are_numbers_that_people_write(planned, monkeypatch, given, cells):
    monkeypatch.setattr(submit, "estimate_of", lambda recipe: estimate(**given))
    line = next(line for line in plan_lines(*planned(seeds(1)), answered=False) if line.endswith("submit"))
    shown = tuple(re.split(r"\s{2,}", line)[-4:-1])
    assert shown == tuple("5.00e-09" if cell == "5e-09" else cell for cell in cells)


@pytest.mark.parametrize(
    ("outcomes", "which"), [(["oom", "hang"], "--outcome hang,oom"), (["oom", None], "--all-failed")]
)
def test_runs_that_ended_are_told_how_to_run_again(planned, outcomes, which):
    found, decisions = planned(seeds(2))
    ended = [
        dataclasses.replace(decision, action="ended", outcome=outcome)
        for decision, outcome in zip(decisions, outcomes, strict=True)
    ]
    lines = plan_lines(found, ended)
    assert lines[-1] == f"to run those again: titanlab retry layouts {which}"
    assert "2 ended otherwise" in lines


def test_the_values_are_json_and_have_every_run_and_point(planned):
    values = plan_values(*planned([{"shard": 2}], dropped=[{"shard": 5}]))
    assert json.loads(json.dumps(values)) == values
    (run,) = values["runs"]
    assert (run["point"], run["action"], run["outcome"], run["control"]) == ({"shard": 2}, "submit", None, False)
    assert values["dropped"] == [{"point": {"shard": 5}, "repeat": 0, "stage": "rule", "reason": "is wrong"}]
    assert (values["sweep"], values["counts"]) == ("layouts", {"submit": 1})


def test_runs_that_ended_without_the_tracker_that_is_asked_for_now_are_told(planned):
    """A sweep with tracker=wandb was only "6 done already", and wandb never had anything of it."""
    found, decisions = planned(seeds(2))
    asked = [
        dataclasses.replace(
            decision,
            action="done",
            planned=dataclasses.replace(
                decision.planned, recipe=dataclasses.replace(decision.planned.recipe, tracker=Wandb())
            ),
        )
        for decision in decisions
    ]
    line = "2 runs ended without tracker=wandb; to write its files from metrics.jsonl: titanlab sync --tracker wandb "
    assert any(each.startswith(line) for each in plan_lines(found, asked))
    # Without it nothing is said.
    done = [dataclasses.replace(decision, action="done") for decision in decisions]
    assert not any("tracker" in each for each in plan_lines(found, done))

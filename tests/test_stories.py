"""The twins of the sweeps that tell a story, each run whole as a user does, and the report of each."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.installed_command import titanlab

STORIES = ("stack_8b_128gpus", "stack_70b_256gpus", "stack_405b_512gpus")
STORIES += ("long_context_8b", "long_context_405b", "scaling_8b", "scaling_70b")
FIGURES = {"stack": "stack", "long": "context", "scaling": "scaling"}


@pytest.mark.full
@pytest.mark.parametrize("story", STORIES)
def test_a_twin_ends_with_a_report_that_names_a_winner_or_says_that_it_is_noise(tmp_path, story):
    name = f"{story}_cpu"
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}

    def said(*arguments):
        return titanlab(*arguments, folder=tmp_path, environ=environ, seconds=2400)

    said("sweep", f"+sweeps={name}", "--wait")
    rows = json.loads(said("status", name, "--json"))
    runs = [row for row in rows if row["state"] != "dropped"]
    assert {row["outcome"] for row in runs} == {"done"}
    assert sum(row["control"] for row in runs) >= 3
    answer = said("report", name).splitlines()[0]
    if runs[0]["cores"] > 1:
        assert re.search(r" is the fastest: .*95% interval|within noise", answer)
    # What is emulated, or has more processes than cores, never wins.
    ranking = json.loads(said("best", name, "--json"))
    placed = {run for recipe in ranking["recipes"] if recipe["left_out"] is None for run in recipe["runs"]}
    assert not any(row["emulated"] or row["oversubscribed"] for row in runs if row["run"] in placed)
    page = (tmp_path / "runs" / name / f"{name}.html").read_text()
    assert f'<section id="{FIGURES[story.partition("_")[0]]}"' in page
    assert "These are speeds of a CPU: they do not transfer to GPUs." in page
    # Parts of a step and items of memory are measured for every recipe.
    assert "Where the time of a step goes (estimate)" not in page
    assert "Memory by item (declared)" not in page
    assert "No bar, because figures are missing" not in page
    assert ("Left out: parallelism.async_tensor=true" in page) == (story == "stack_70b_256gpus")

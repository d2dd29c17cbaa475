"""`titanlab checkpoints`: a line for each checkpoint, and what is damaged."""

from __future__ import annotations

import json

import pytest

from tests.weights.saved import run_of, save

VERB = "checkpoints"


@pytest.fixture
def run(here):
    """A run with whole checkpoints of steps 1 and 2."""
    recipe, run = run_of(here / "runs")
    for step in (1, 2):
        save(run, recipe.model, step=step)
    return run


def test_each_checkpoint_is_a_line_by_step(run, say):
    code, out, err = say(run.path)
    assert (code, err) == (0, "")
    heading, *rows = [line.split() for line in out.splitlines()]
    assert heading == ["step", "size", "saved", "state"]
    assert [(row[0], row[-1]) for row in rows] == [("1", "complete"), ("2", "complete")]
    rows = json.loads(say(run.path, "--json")[1])
    assert [(row["step"], row["state"], row["problem"], row["verified"]) for row in rows] == [
        (1, "complete", None, None),
        (2, "complete", None, None),
    ]


def test_a_byte_that_has_changed_is_found_where_asked(run, say):
    largest = max((run.checkpoints / "step-00000002").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert say(run.path)[0] == 0
    code, out, err = say(run.path, "--verify")
    assert (code, err) == (1, "")
    assert ["verified" in line for line in out.splitlines()[1:]] == [True, False]
    assert largest.name in out.splitlines()[2]
    code, out, _ = say(run.path, "--verify", "--json")
    assert (code, [row["problem"] is None for row in json.loads(out)]) == (1, [True, False])


def test_a_run_without_checkpoints_says_so(here, say):
    _, run = run_of(here / "runs")
    assert say(run.path) == (0, f"{run.path.relative_to(here)} has no checkpoints\n", "")
    assert say(run.path, "--json")[:2] == (0, "[]\n")

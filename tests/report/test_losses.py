"""Differences of losses from those of a reference."""

import math

import pytest

from tests.sweep.made import begin, train
from titanlab.errors import ConfigError
from titanlab.report import drawings, frames
from titanlab.report.analyses import DIFFERENCE_COLUMNS, differences_frame, largest_differences


@pytest.fixture
def steps(made):
    for name, losses, keys in (
        ("single", [4.0, 2.0, 0.0, 1.0], {}),
        ("fsdp", [4.0, 2.5, 0.0, 1.0], {"shard": 2}),
        ("short", [3.0, 2.0], {"shard": 4}),
        ("nan", [4.0, math.nan, 1.0, 1.0], {"shard": 6}),
    ):
        run = made.run(name, **keys)
        begin(run)
        train(run, losses=losses)
    return frames.metrics_frame(made.folder.path)


def test_differences_are_relative_and_by_step(steps):
    reference = steps.run[0]
    frame = differences_frame(steps, reference)
    assert list(frame.columns) == list(DIFFERENCE_COLUMNS)
    assert reference not in set(frame["run"])
    of = {name: list(frame[frame["name"] == name]["loss_difference"]) for name in ("fsdp", "short", "nan")}
    assert of["fsdp"] == [0.0, 0.25, 0.0, 0.0]
    # Only steps that both have.
    assert of["short"] == [0.25, 0.0]
    # Neither a loss that is missing nor a division by zero is a difference.
    assert of["nan"][0] == of["nan"][3] == 0.0
    assert [math.isnan(value) for value in of["nan"][1:3]] == [True, True]
    assert list(frame[frame["name"] == "fsdp"]["tokens"]) == [384, 768, 1152, 1536]


def test_the_largest_difference_of_each_run(steps):
    largest = largest_differences(differences_frame(steps, steps.run[0]))
    assert list(largest["name"]) == ["fsdp", "short", "nan"]
    assert list(largest["steps"]) == [4, 2, 4]
    assert list(largest["loss_difference"]) == [0.25, 0.25, 0.0]


def test_an_unknown_reference_is_refused(steps):
    with pytest.raises(ConfigError, match="is no run of these steps; known: single-"):
        differences_frame(steps, "gone")
    with pytest.raises(ConfigError, match="no run has logged a step"):
        differences_frame(steps[:0], "gone")


def test_the_figure_has_a_line_for_each_run(steps):
    frame = differences_frame(steps, steps.run[0])
    figure = drawings.draw_differences(frame, tolerance=0.01)
    assert len(figure.axes[0].lines) == 3 + 1
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.25]
    drawings.draw_differences(frame, column="grad_norm_difference").draw_without_rendering()
    drawings.draw_differences(frame[:0]).draw_without_rendering()

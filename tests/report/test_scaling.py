"""Scaling: speed of one device against that of the same recipe on fewer devices."""

import pytest

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter
from titanlab.report import drawings, frames
from titanlab.report.analyses import SCALING_COLUMNS, scaling_frame


def done(made, name, speed, *, cores=8, repeat=0, **keys):
    run = made.run(name, point={"layout": name}, repeat=repeat, **keys)
    begin(run, cores=cores)
    train(run)
    end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed})


@pytest.fixture
def swept(made):
    done(made, "single", 1000.0)
    done(made, "fsdp", 1600.0, shard=2)
    done(made, "fsdp", 400.0, repeat=1, shard=2)
    done(made, "four", 500.0, cores=2, shard=4)
    lost = made.run("lost", shard=6)
    begin(lost)
    end(lost, "oom")
    return frames.sweep_frame(made.folder.path)


def test_efficiency_is_that_of_one_device(swept):
    scaling = scaling_frame(swept)
    assert list(scaling.columns) == list(SCALING_COLUMNS)
    assert list(scaling["world"]) == [1, 2, 4]
    assert list(scaling["efficiency_percent"]) == pytest.approx([100.0, 80.0, 50.0])
    assert list(scaling["speedup"]) == pytest.approx([1.0, 1.6, 2.0])
    assert list(scaling["runs"]) == [1, 2, 1]
    assert list(scaling["oversubscribed"]) == [False, False, True]
    assert set(scaling["reference"]) == {scaling["recipe"][0]}


def test_recipes_that_differ_in_more_than_the_layout_have_references_of_their_own(made, swept):
    done(made, "bf16", 2000.0, bf16=True)
    scaling = scaling_frame(frames.sweep_frame(made.folder.path))
    (other,) = scaling[scaling["recipe"].str.contains("bf16")].to_dict("records")
    assert (other["reference"], other["efficiency_percent"]) == (other["recipe"], 100.0)


def test_weak_scaling_compares_equal_batches_of_a_device(made, swept):
    batch = int(swept.global_batch[0])
    done(made, "weak", 950.0, shard=2, global_batch=2 * batch)
    runs = frames.sweep_frame(made.folder.path)
    strong, weak = scaling_frame(runs), scaling_frame(runs, weak=True)
    (row,) = weak[(weak["world"] == 2) & (weak["efficiency_percent"].round(6) == 95.0)].to_dict("records")
    assert row["speedup"] == pytest.approx(1.9)
    assert 95.0 not in set(strong["efficiency_percent"])


def test_figures_are_drawn_with_and_without_runs(swept):
    figure = drawings.draw_scaling(scaling_frame(swept))
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([100.0, 80.0, 50.0])
    assert [bar.get_hatch() for bar in figure.axes[0].patches] == [None, None, "////"]
    empty = drawings.draw_scaling(scaling_frame(swept[swept.outcome == "oom"]))
    assert empty.axes[0].patches == [] or not list(empty.axes[0].patches)
    empty.draw_without_rendering()

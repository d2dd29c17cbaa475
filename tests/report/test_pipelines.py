"""Schedules compared, and the pipelines of a sweep."""

import pytest

from tests.sweep.made import begin, end, train
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.report import drawings
from titanlab.report.analyses import pipelines_frame, schedules, schedules_frame, timeline_of
from titanlab.techniques.schedule.action import Kind


def test_bubbles_are_those_of_the_formulas():
    frame = schedules_frame(ranks=(2, 4), microbatches=(8, 16)).set_index(["schedule", "ranks", "microbatches"])
    for ranks in (2, 4):
        for count in (8, 16):
            idle = 100 * (ranks - 1) / (count + ranks - 1)
            assert frame.loc[("1f1b", ranks, count), "bubble_percent"] == pytest.approx(idle)
            assert frame.loc[("gpipe", ranks, count), "bubble_percent"] == pytest.approx(idle)
            halved = 100 * (ranks - 1) / (2 * count + ranks - 1)
            assert frame.loc[("interleaved_1f1b", ranks, count), "bubble_percent"] == pytest.approx(halved)
    assert frame.loc[("gpipe", 4, 16), "peak_in_flight"] == 16
    assert frame.loc[("1f1b", 4, 16), ["peak_in_flight", "step"]].to_list() == [4, 57]
    assert set(frame.reset_index()["schedule"]) == set(schedules()) == {*discover()["schedule"]} - {"csv", None}


def test_a_schedule_has_no_row_where_it_is_not_allowed():
    frame = schedules_frame(ranks=(4,), microbatches=(3,))
    assert "dualpipe_v" not in set(frame["schedule"])
    assert "1f1b" in set(frame["schedule"])


def test_a_timeline_takes_durations_of_all_layers_of_a_rank():
    durations = {Kind.FORWARD: 2.0, Kind.BACKWARD: 4.0, Kind.INPUT: 2.0, Kind.WEIGHT: 2.0}
    usual = timeline_of("interleaved_1f1b", ranks=2, microbatches=4)
    slower = timeline_of("interleaved_1f1b", ranks=2, microbatches=4, durations=durations)
    assert slower.duration == 2 * usual.duration
    with pytest.raises(ConfigError, match="is no schedule without a file; known: 1f1b"):
        timeline_of("csv", ranks=2, microbatches=4)


def test_pipelines_of_a_sweep_are_those_that_are_done(made):
    for name, kind, keys in (
        ("pp", "done", {"pipeline": 2}),
        ("lost", "oom", {"pipeline": 2, "seed": 1}),
        ("fsdp", "done", {"shard": 2}),
    ):
        run = made.run(name, **keys)
        begin(run)
        train(run)
        end(run, kind)
    frame = pipelines_frame(made.folder.path)
    (row,) = frame.to_dict("records")
    assert (row["name"], row["ranks"], row["stages"], row["schedule"]) == ("pp", 2, 2, "1f1b")
    idle = 1 / (row["microbatches"] + 1)
    assert row["bubble_percent"] == pytest.approx(100 * idle)
    assert row["busy_seconds"] == pytest.approx(0.25 * (1 - idle))
    drawings.draw_bubbles(schedules_frame()).draw_without_rendering()
    drawings.draw_bubbles(schedules_frame()[:0]).draw_without_rendering()

"""tracker=tensorboard: event files that TensorBoard reads, and trouble that stays its own."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanlab.techniques.tracker.contract import TrackedRun, open_tracker
from titanlab.techniques.tracker.trackers_schema import TensorBoard


def a_run(folder, **given):
    return TrackedRun(
        id="abcd", name="toy", sweep="single", folder=folder, config={"a": 1}, layout={"shard": 2}, **given
    )


def read(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_rows_and_summary_come_out_as_they_went_in(tmp_path):
    told = []
    tracker = open_tracker(TensorBoard(), a_run(tmp_path), warn=told.append)
    for step in (1, 2):
        tracker.log(step, {"loss_metrics/global_avg_loss": 5.0 - step, "mfu(%)": None, "note": "text"})
    tracker.finish({"throughput(tps)": 7.0, "peak_source": "datasheet", "mfu(%)": None})
    events = read(tmp_path)
    assert [(row.step, row.value) for row in events.Scalars("loss_metrics/global_avg_loss")] == [(1, 4.0), (2, 3.0)]
    tags = events.Tags()
    assert sorted(tags["scalars"]) == ["loss_metrics/global_avg_loss", "summary/throughput(tps)"]
    recipe = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"layout.shard": 2' in recipe
    assert told == []


def test_a_resumed_run_hides_the_rows_that_no_longer_count(tmp_path):
    first = open_tracker(TensorBoard(), a_run(tmp_path), warn=pytest.fail)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": 1.0})
    first.finish({})
    # TensorBoard reads files in the order of their names, and these begin with the second in which a file was opened.
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.1000000000.earlier"))
    second = open_tracker(TensorBoard(), a_run(tmp_path, attempt=2, resumed_step=2), warn=pytest.fail)
    second.log(3, {"loss": 2.0})
    second.finish({})
    assert [(row.step, row.value) for row in read(tmp_path).Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_trouble_costs_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    told = []
    tracker = open_tracker(TensorBoard(), a_run(tmp_path), warn=told.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert len(told) == 1
    assert told[0].startswith("tensorboard stopped (")

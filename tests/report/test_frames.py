"""Sweeps as data frames."""

import pandas as pd
import pytest

from tests.sweep.made import Made, begin, end, train
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.report.frames import metrics_frame, sweep_frame
from titanlab.sweep import NAMES, SweepTable, write_table


@pytest.fixture
def mixed(made):
    done = made.run("fsdp", shard=2)
    begin(done, cores=1)
    train(done, losses=[5.0, 4.0, 3.0])
    end(done)
    running = made.run("tp", tensor=2)
    begin(running)
    train(running, losses=[5.0, 4.5])
    made.run("waiting", seed=1)
    made.drop("rule", "no", parallelism="tp3")
    return made


def test_a_row_for_each_run_and_dropped_point(mixed):
    frame = sweep_frame(mixed.folder.path)
    assert list(frame) == [*NAMES, "point.parallelism"]
    assert frame.state.tolist() == ["ended", "running", "prepared", "dropped"]
    assert frame.oversubscribed.tolist()[:2] == [True, False]
    assert frame.oversubscribed.isna().tolist() == [False, False, True, True]
    assert frame.loc[frame.outcome == "done", "tokens_per_second"].tolist() == [1000.0]
    kinds = {column: str(frame[column].dtype) for column in ("world", "loss", "oversubscribed")}
    assert kinds == {"world": "Int64", "loss": "float64", "oversubscribed": "boolean"}


def test_types_do_not_depend_on_values(mixed, tmp_path):
    empty = Made(tmp_path / "other")
    empty.drop("rule", "no", parallelism="tp3")
    assert sweep_frame(empty.folder.path).dtypes.equals(sweep_frame(mixed.folder.path).dtypes)


def test_what_collect_wrote_reads_the_same(mixed, tmp_path):
    file, _ = write_table(SweepTable(mixed.folder).rows(), "layouts", tmp_path / "into")
    pd.testing.assert_frame_equal(sweep_frame(file), sweep_frame(str(mixed.folder.path)))


def test_a_row_for_each_logged_step(mixed):
    frame = metrics_frame(mixed.folder.path)
    assert list(frame)[:4] == ["run", "name", "layout.label", "point.parallelism"]
    assert frame.name.tolist() == ["fsdp"] * 3 + ["tp"] * 2
    assert frame.step.tolist() == [1, 2, 3, 1, 2]
    assert frame[meter.LOSS].tolist() == [5.0, 4.0, 3.0, 5.0, 4.5]
    assert set(frame["layout.label"]) == {"dp_s2", "tp2"}
    assert metrics_frame(mixed.folder.path, "validation").empty


def test_rows_keep_the_layout_of_their_attempt(made):
    run = made.run("a", shard=2)
    begin(run)
    train(run, losses=[5.0, 4.0])
    end(run, "cancelled")
    begin(run, world=4, parallelism={**run.config()["parallelism"], "shard": 4})
    with run.open_metrics(2, resumed_step=1) as metrics:
        metrics.write("train", 2, {meter.LOSS: 3.5})
    frame = metrics_frame(made.folder.path)
    assert frame["layout.label"].tolist() == ["dp_s2", "dp_s4"]
    # The first attempt's second step was gone over again.
    assert frame[meter.LOSS].tolist() == [5.0, 3.5]


def test_a_sweep_without_steps_has_the_columns(made):
    made.run("a")
    frame = metrics_frame(made.folder.path)
    assert frame.empty
    assert {"run", "name", "layout.label", "step", meter.LOSS, meter.TOKENS_SEEN} <= set(frame)


def test_what_is_no_sweep_is_one_line(tmp_path):
    (tmp_path / "table.parquet").write_text("no")
    with pytest.raises(ConfigError, match="is no parquet file"):
        sweep_frame(tmp_path / "table.parquet")
    for frame in (sweep_frame, metrics_frame):
        with pytest.raises(ConfigError, match="is no sweep's folder"):
            frame(tmp_path / "nothing")

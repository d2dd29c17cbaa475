"""schedule=csv: the order of a file, and for which pipelines it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import KINDS, Schedule
from titanlab.errors import ConfigError
from titanlab.schedule.action_file import write_actions
from titanlab.schedule.csv_schema import CsvSchedule


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("orders") / "order.csv"


@given(kind=st.sampled_from(KINDS), ranks=st.integers(1, 4), more=st.integers(0, 5))
def test_what_is_written_is_read(path, kind, ranks, more):
    schedule, microbatches = Schedule(kind), 2 * ranks + more
    orders = schedule.actions(ranks, microbatches)
    write_actions(path, orders)
    config = CsvSchedule(file=str(path))
    assert config.fixed_size() == (ranks, microbatches)
    config.check_pipeline(ranks=ranks, microbatches=microbatches)
    assert config.actions(ranks=ranks, microbatches=microbatches) == orders
    assert config.placement(ranks=ranks) == schedule.placement(ranks)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "complaint"),
    [
        (4, 2, "has 2 lines, one a rank, and the pipeline has 4 ranks; try parallelism.pipeline=2, or schedule=1f1b"),
        (2, 1, "is for 2 microbatches a step, and a step has 1; try training.global_batch times 2"),
        (2, 6, "is for 2 microbatches a step, and a step has 6; try training.microbatch times 3"),
        (2, 3, "is for 2 microbatches a step, and a step has 3; try schedule=1f1b, or a file for 3"),
    ],
)
def test_a_file_for_another_pipeline(path, ranks, microbatches, complaint):
    write_actions(path, Schedule("1f1b").actions(2, 2))
    with pytest.raises(ConfigError, match=complaint):
        CsvSchedule(file=str(path)).check_pipeline(ranks=ranks, microbatches=microbatches)


def test_no_file(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"schedule\.file=: names no file"):
        CsvSchedule()
    monkeypatch.chdir(tmp_path)
    assert CsvSchedule(file="my.csv").file == str(tmp_path / "my.csv")

"""schedule=csv: the order of a file, and for which pipelines it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.schedule.conftest import KINDS, Schedule, words
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.csv_schema import CsvSchedule, write_actions


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


def test_the_placement_of_a_file_for_other_ranks_is_refused(path):
    write_actions(path, Schedule("zbv").actions(2, 4))
    config = CsvSchedule(file=str(path))
    assert config.placement(ranks=2) == [0, 1, 1, 0]
    with pytest.raises(ConfigError, match="has 2 lines, one a rank, and the pipeline has 3 ranks"):
        config.placement(ranks=3)


def test_before_it_is_read_a_file_has_at_least_a_stage_for_each_rank(tmp_path):
    assert CsvSchedule(file=str(tmp_path / "not written yet.csv")).stage_count(ranks=3) == 3


def test_no_file(tmp_path, monkeypatch):
    for fields in ({}, {"file": " \t"}):
        with pytest.raises(ConfigError, match=r"schedule\.file=: names no file"):
            CsvSchedule(**fields)
    monkeypatch.chdir(tmp_path)
    assert CsvSchedule(file="my.csv").file == str(tmp_path / "my.csv")


@pytest.mark.parametrize("name", ["gone.csv", "a\0b.csv", "~nobody99/my.csv", "folder", "pipe", "bytes.csv"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    # A plain open of a pipe would wait for a writer for ever.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes.csv").write_bytes(b"0F0,\xff\n")
    with pytest.raises(ConfigError, match=r"^schedule\.file=[^\n]+: cannot be read \([^\n]+\); [^\n]+$"):
        CsvSchedule(file=name).check_pipeline(ranks=2, microbatches=2)


def test_torch_reads_what_is_written(path):
    lists = Schedule("zbv").actions(3, 5)
    write_actions(path, lists)
    schedule = object.__new__(PipelineScheduleMulti)
    schedule.pipeline_order = {}
    schedule._validate_and_set_stage_mapping = lambda order: None
    schedule._load_csv(str(path))
    assert [words([each])[0] for each in lists] == [
        " ".join(map(str, each)) for each in schedule.pipeline_order.values()
    ]


def test_idle_cells_and_torchs_pairs_are_read(path):
    path.write_text(",0F0,,0F1 ,(0F2;0B0)OVERLAP_F_B,0B1,,0B2,\n\n \n")
    assert words(CsvSchedule(file=str(path)).actions(ranks=1, microbatches=3)) == ["0F0 0F1 0F2 0B0 0B1 0B2"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((empty, "has no action; give it one line a rank") for empty in ("", "\n\n", ",,\n", "\ufeff")),
        ("0F0,0X0\n", "line 1, cell 2: '0X0' is not an action; write stage, F, B, I or W, and microbatch, as in 0F0"),
        ("0F0,0B0\n1F0,-1B0", "line 2, cell 2: '-1B0' is not an action"),
        ("0F0,0B", "line 1, cell 2: '0B' is not an action"),
        ("0F0,(0B0;0Q0)OVERLAP_F_B", "line 1, cell 2: '0Q0' is not an action"),
        ("0F0,999999999F0", "line 1, cell 2: '999999999F0' is not an action"),
        ("0F0,0SEND_F0,0B0", "line 1, cell 2: 0SEND_F0 is communication, which follows from the order; leave"),
        ("0F0,0B0,0REDUCE_GRAD", "line 1, cell 3: 0REDUCE_GRAD is communication"),
        # What makes no schedule is told with the line and the cell; all of it is in test_order.
        ("0F0,,0F0", "line 1, cell 3: 0F0 occurs twice; each stage runs each microbatch F and B once"),
        ("0F0,0B0\n\n1F0,1B0", "line 2: has no action"),
        ("0F0,0B0\n2F0,2B0", "line 2: there is a stage 2, but no rank has stage 1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0", "line 1, cell 2: 0B0 on rank 0 waits for 1B0, which comes after 1F1"),
    ],
)
def test_a_faulty_file_is_one_line(path, text, complaint):
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        CsvSchedule(file=str(path)).fixed_size()
    assert str(caught.value).startswith(f"schedule.file={path}: {complaint}")


@pytest.mark.parametrize("text", ["\ufeff0F0,0B0\n", "0F0,0B0\r\n,,\r\n\r\n", "0F0\t, 0B0"])
def test_what_a_spreadsheet_writes_is_read(tmp_path, text):
    (tmp_path / "my.csv").write_bytes(text.encode())
    assert CsvSchedule(file=str(tmp_path / "my.csv")).fixed_size() == (1, 1)

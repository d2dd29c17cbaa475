"""Orders in files: what is written is read, by us and by torch; what is wrong is told by line and cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.schedule.conftest import KINDS, Schedule
from titanlab.errors import ConfigError
from titanlab.schedule.action_file import read_actions, write_actions
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


def test_torch_reads_the_same(path):
    orders = Schedule("zbv").actions(3, 5)
    write_actions(path, orders)
    schedule = object.__new__(PipelineScheduleMulti)
    schedule.pipeline_order = {}
    schedule._validate_and_set_stage_mapping = lambda order: None
    schedule._load_csv(str(path))
    read = [[str(action) for action in actions] for actions in schedule.pipeline_order.values()]
    assert read == [[str(action) for action in order] for order in orders]


def test_idle_cells_and_torchs_pairs(path):
    path.write_text(",0F0,,0F1 ,(0F2;0B0)OVERLAP_F_B,0B1,,0B2,\n\n \n")
    assert [str(action) for action in read_actions(path)[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    path.write_bytes("\ufeff0F0,0B0\r\n".encode())
    assert [str(action) for action in read_actions(path)[0]] == ["0F0", "0B0"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no action; give it one line a rank"),
        ("0F0,0X0\n", "line 1, cell 2: '0X0' is no action; write stage, F, B, I or W, and microbatch, as in 0F0"),
        ("0F0,0B0\n1F0,-1B0", "line 2, cell 2: '-1B0' is no action"),
        ("0F0,0B", "line 1, cell 2: '0B' is no action"),
        ("0F0,(0B0;0Q0)OVERLAP_F_B", "line 1, cell 2: '0Q0' is no action"),
        ("0F0,0SEND_F0,0B0", "line 1, cell 2: 0SEND_F0 is communication, which follows from the order; leave"),
        ("0F0,0B0,0REDUCE_GRAD", "line 1, cell 3: 0REDUCE_GRAD is communication"),
        ("0F0,,0F0", "line 1, cell 3: 0F0 is there twice; each stage runs each microbatch F and B once"),
        ("0F0,0B0\n,0B0", "line 2, cell 2: 0B0: stage 0 is on rank 0 already"),
        ("0F0,0B0\n\n1F0,1B0", "line 2: has no action"),
        ("0F0,0B0,0F1", "line 1: 0B1, or I and W instead, is missing"),
        ("0F0,0B0\n2F0,2B0", "line 2: there is a stage 2, but no rank has stage 1"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0",
            "line 1, cell 2: 0B0 on rank 0 waits for 1B0, which comes after 1F1 on rank 1; 1F1 on rank 1 waits for",
        ),
        ("0F0,999999999F0", "line 1, cell 2: '999999999F0' is no action"),
        ("\udcff", "cannot be read ('utf-8' codec can't decode"),
    ],
)
def test_a_faulty_file_is_one_line(path, text, complaint):
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_actions(path)
    assert str(caught.value).startswith(f"schedule.file={path}: {complaint}")


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
    with pytest.raises(ConfigError, match="cannot be read"):
        read_actions(tmp_path / "nope.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_actions(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert CsvSchedule(file="my.csv").file == str(tmp_path / "my.csv")

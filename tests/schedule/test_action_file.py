"""Orders in files: what is written is read, by us and by torch; what is wrong is told by line and cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from tests.schedule.conftest import Schedule
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import Action, Kind
from titanlab.techniques.schedule.csv_schema import read_actions, write_actions


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "order.csv"


def test_a_line_is_a_rank_and_a_cell_an_action(path):
    orders = [[Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)]]
    orders.append([Action(1, Kind.FORWARD, 0), Action(1, Kind.INPUT, 0), Action(1, Kind.WEIGHT, 0)])
    write_actions(path, orders)
    assert path.read_text() == "0F0,0B0\n1F0,1I0,1W0\n"
    assert read_actions(path) == read_actions(str(path)) == orders


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


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_actions(tmp_path / "nope.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_actions(tmp_path)

"""Ends of runs on the disk: they come back, and damage is one line."""

from __future__ import annotations

import json

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Outcome, OutcomeKind, RunFolder
from titanlab.system import FolderGone

OUTCOME = Outcome(
    kind=OutcomeKind.OOM, step=3, steps=9, attempt=2, rank=1, cause="é", exit_code=70, ended=5.0, metrics={"loss": 1.5}
)


def test_an_end_comes_back(tmp_path):
    run = RunFolder(tmp_path)
    run.write_result(OUTCOME)
    assert run.result() == run.result(2) == OUTCOME
    assert json.loads((tmp_path / "result.json").read_text())["schema"] == 1


def test_without_a_file_there_is_no_end(tmp_path):
    assert RunFolder(tmp_path).result() is None


def test_numbers_that_are_not_finite_are_null(tmp_path):
    RunFolder(tmp_path).write_result(Outcome(kind=OutcomeKind.NAN, metrics={"loss": float("nan")}))
    assert RunFolder(tmp_path).result().metrics == {"loss": None}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "tired"}, "kind=tired: invalid enum value 'tired' in "),
        ({"kind": ...}, "kind=null: is missing in "),
        ({"kind": 5}, "kind=5: expected `str`, got `int` in "),
        ({"schema": 2}, "schema=2: "),
        ({"step": "3"}, "step=3: expected `int`, got `str` in "),
        ({"metrics": None}, "metrics=null: expected `object`, got `null` in "),
        ({"rank": 0.5}, "rank=0.5: expected `int | null`, got `float` in "),
    ],
)
def test_a_damaged_end_is_one_line(tmp_path, changed, said):
    content = OUTCOME.to_mapping() | changed
    (tmp_path / "result.json").write_text(
        json.dumps({key: value for key, value in content.items() if value is not ...})
    )
    with pytest.raises(ConfigError) as caught:
        RunFolder(tmp_path).result()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_a_later_version_are_left_out(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(OUTCOME.to_mapping() | {"mood": "good"}))
    assert RunFolder(tmp_path).result() == OUTCOME


def test_a_run_that_is_gone_is_not_made_anew(tmp_path):
    with pytest.raises(FolderGone):
        RunFolder(tmp_path / "gone").write_result(OUTCOME)
    assert list(tmp_path.iterdir()) == []

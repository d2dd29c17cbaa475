"""position.json: what no run saves is told in one line, and the run goes on from the checkpoint before it."""

from __future__ import annotations

import base64
import json

import pytest
from msgspec import structs

from tests import tiny
from tests.checkpoint.storage import rewritten
from titanlab.checkpoint import (
    DamagedCheckpoint,
    SavedPosition,
    position_bytes,
    read_position,
)
from titanlab.checkpoint.folders import step_folder
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind

WHOLE = {
    "step": 3,
    "tokens": 90,
    "data": {"samples": 12},
    "tracker": None,
    "layout": {"shard": 2},
    "loss_scale": {"scale": 2.0},
    "parameters": {"a.weight": [2, 3]},
    "files": {"__0_0.distcp": 7},
}


def written(folder, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "position.json").write_text(json.dumps({**WHOLE, **changed}))
    (folder / "index.json").touch()
    return folder


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"step": 90}, "its position.json is of step 90, and the folder's name says 3"),
        ({"step": -3}, "has step: Expected `int` >= 0"),
        ({"step": True}, "has step: Expected `int`, got `bool`"),
        ({"step": 10**30}, "has step: Expected `int` <= "),
        ({"tokens": float("nan")}, "is not JSON (JSON is malformed"),
        ({"loss_scale": {"scale": "2"}}, "has loss_scale[...]: Expected `int | float`, got `str`"),
        ({"loss_scale": {"scale": 10**400}}, "has loss_scale[...]: "),
        ({"loss_scale": {"scale": True}}, "has loss_scale[...]: Expected `int | float`, got `bool`"),
        ({"loss_scale": {"scale": 2.0, "good": 2**70}}, "has loss_scale[...]: Expected `int` <= "),
        ({"loss_scale": {"scale": 0.0}}, "does not fit (loss_scale has scale=0.0, which must be positive)"),
        # Zero in float32.
        ({"loss_scale": {"scale": 1e-200}}, "does not fit (loss_scale has scale=1e-200, which must be positive)"),
        ({"loss_scale": {"scale": 2.0, "row": -1}}, "does not fit (loss_scale has row=-1, which must not be negative)"),
        ({"files": {"../../secret": 3}}, "Expected `str` matching regex"),
        ({"generators": {"0": {"cpu": [1]}}}, "has generators[...][...]: Expected `bytes`, got `array`"),
        ({"generators": {"-1": {"cpu": ""}}}, "has generators"),
        ({"generators": {"0": {"posix.system": ""}}}, "has generators"),
        (
            {"generators": {"0": {"cpu": base64.b64encode(bytes(1 << 17)).decode()}}},
            "has generators[...][...]: Expected",
        ),
        ({"recipe": "x"}, "has recipe: Expected `str` matching regex"),
        ({"contents": "optimizer"}, "has contents: Invalid enum value"),
        ({"later": 1}, "does not fit (Object contains unknown field `later`)"),
    ],
    ids=str,
)
def test_what_no_run_saves_is_refused(tmp_path, changed, rule):
    with pytest.raises(ConfigError) as refused:
        read_position(written(tmp_path / "step-00000003", **changed), "run")
    assert rule in str(refused.value)
    assert str(refused.value).endswith("; give another checkpoint, or a whole copy of this one")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"data":' * 5_000 + b"1" + b"}" * 5_000, b"[1]", b"3", b""])
def test_content_that_is_nested_or_no_mapping_is_refused(tmp_path, content):
    (tmp_path / "position.json").write_bytes(content)
    (tmp_path / "index.json").touch()
    with pytest.raises(ConfigError, match=r"position\.json"):
        read_position(tmp_path, "run")


def test_what_is_written_is_read(tmp_path):
    saved = SavedPosition(
        step=3, data={"samples": 12, "at": float("nan")}, routing={"layers.0": [0.5]}, parameters={"é": [2]},
        files={"a": 7}, generators={1: {"cpu": b"\0\xff"}}, recipe="ab" * 32, contents="model",
    )  # fmt: skip
    (tmp_path / "position.json").write_bytes(position_bytes(saved))
    found = read_position(tmp_path, "run")
    # JSON has no NaN.
    assert found == structs.replace(saved, data={"samples": 12, "at": None})
    assert b'"generators": {\n  "1": {\n   "cpu": "AP8="' in position_bytes(saved)
    assert b"routing" not in (short := position_bytes(SavedPosition(step=0, parameters={})))
    assert b"contents" not in short
    # One of an earlier version has few keys, and one that a person has copied any name.
    (tmp_path / "position.json").write_text('{"step": 3, "parameters": {}}')
    assert read_position(tmp_path, "run") == SavedPosition(step=3, parameters={})


@pytest.fixture
def saved(tmp_path):
    """A recipe of four steps, and its run, which has saved steps 1 and 2."""
    made = tiny.recipe(tmp_path, steps=2, every=1, keep=0)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    (run.path / "result.json").unlink()
    return tiny.changed(made, steps=4, every=0), run


@pytest.mark.parametrize(("name", "value"), [("samples", "x"), ("samples", None), ("fingerprint", None)])
def test_what_only_the_data_can_judge_is_found_by_the_ranks(saved, name, value):
    made, run = saved
    rewritten(step_folder(run.checkpoints, 2), lambda position: position["data"].update({name: value}))
    assert tiny.as_rank(made, tiny.begin(made, run)).kind is OutcomeKind.DONE
    assert [row["step"] for row in run.metrics("train")][-3:] == [2, 3, 4]
    log = (run.logs / "rank-0.log").read_text()
    assert f"goes on from step 1: step-00000002 its position.json has data.{name}={value or 'null'}: must be" in log
    assert "Traceback" not in log


def test_without_an_older_checkpoint_it_is_one_line(saved):
    made, run = saved
    for step in (1, 2):
        rewritten(step_folder(run.checkpoints, step), lambda position: position["data"].pop("samples"))
    with pytest.raises(DamagedCheckpoint, match=r"its position\.json has data\.samples=null: must be"):
        tiny.as_rank(made, tiny.begin(made, run))

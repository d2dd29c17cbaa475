"""The id of a run in trackers: fixed when its folder is made, and kept."""

import json
import shutil
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.made import begin
from titanlab.recipe import to_mapping
from titanlab.records import RunFolder, create_run, identify
from titanlab.techniques.tracker.contract import RECORD_FILE, Record, write_record
from titanlab.train.tracking import tracked_run


def made(runs, sweep="layouts", name="toy", repeat=0):
    recipe = replace(tiny.recipe(runs), sweep=sweep, name=name, repeat=repeat)
    identity = identify(recipe, data="tiny", hardware="cpu", repeat=repeat)
    return recipe, create_run(runs, sweep=sweep, name=name, identity=identity, config=to_mapping(recipe))


def id_of(recipe, run, **given):
    return tracked_run(recipe, run, attempt=1, **given).id


def test_it_is_of_the_folder_and_kept(tmp_path, monkeypatch):
    recipe, run = made(tmp_path / "runs")
    first = id_of(recipe, run)
    assert first.startswith(f"{run.hash8}-")
    # A checkpoint, an attempt or another user on the same folder does not change it.
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert id_of(recipe, run, id="of-a-checkpoint") == first
    begin(run)
    write_record(run.attempt_folder(1) / RECORD_FILE, Record(kind="wandb", id="of-an-attempt"))
    assert id_of(recipe, run) == first
    # Nor does it change when the folder moves.
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved" / run.path.relative_to(tmp_path / "runs"))
    assert id_of(recipe, moved) == first


def test_the_same_run_begun_anew_in_its_folder_has_the_same(tmp_path):
    recipe, run = made(tmp_path / "runs")
    first = id_of(recipe, run)
    run.path.rename(run.path.with_name("superseded"))
    assert id_of(*made(tmp_path / "runs")) == first


@pytest.mark.parametrize("other", [{"sweep": "other"}, {"name": "other"}, {"repeat": 1}])
def test_the_same_training_elsewhere_has_another(tmp_path, other, monkeypatch):
    first = id_of(*made(tmp_path / "runs"))
    assert id_of(*made(tmp_path / "runs", **other)) != first
    assert id_of(*made(tmp_path / "others")) != first
    monkeypatch.setenv("LOGNAME", "somebody-else")
    shutil.rmtree(tmp_path / "runs")
    assert id_of(*made(tmp_path / "runs")) != first


def test_older_runs_keep_theirs(tmp_path):
    recipe, run = made(tmp_path / "runs")
    file = run.path / "identity.json"
    content = json.loads(file.read_text())
    del content["tracker_id"]
    file.write_text(json.dumps(content))
    assert id_of(recipe, run, id="of-a-checkpoint") == "of-a-checkpoint"
    # It ended before its first checkpoint.
    begin(run)
    write_record(run.attempt_folder(1) / RECORD_FILE, Record(kind="wandb", id="of-an-attempt"))
    assert id_of(recipe, run) == "of-an-attempt"


def test_a_user_without_a_name(tmp_path, monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("titanlab.records.run_folder.getpass.getuser", nobody)
    recipe, run = made(tmp_path / "runs")
    assert id_of(recipe, run).startswith(run.hash8)

"""What the trackers of a run lack: one line, the files that wait, and steps that two attempts have."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.made import Made, begin
from titanlab.costs import meter
from titanlab.recipe import to_mapping
from titanlab.records import RunFolder, create_run, identify
from titanlab.techniques.tracker.contract import FINISHED, OPEN, RECORD_FILE, Record, write_record
from titanlab.train import has_repeated_steps, tracker_gap, waiting_files
from titanlab.train.tracking import tracked_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Made(tmp_path / "runs").run("one")


def attempt(run, steps=(), *, resumed_step=0, **record):
    """An attempt with these steps; the record of its tracker if one is given. Returns its number."""
    number = begin(run)
    with run.open_metrics(number, resumed_step=resumed_step) as metrics:
        for step in steps:
            metrics.write("train", step, {meter.LOSS: float(step)})
    if record:
        write_record(run.attempt_folder(number) / RECORD_FILE, Record(attempt=number, **{"kind": "wandb", **record}))
    return number


def file(run, folder, *, is_uploaded=False):
    """A file of wandb in a folder of the run."""
    path = run.path / folder / "run-x.wandb"
    path.parent.mkdir(parents=True)
    path.write_text("")
    if is_uploaded:
        path.with_name("run-x.wandb.synced").write_text("")
    return path


def gap(run):
    """The line without its command."""
    line = tracker_gap(run)
    if line is None:
        return None
    assert "\n" not in line
    text, _, command = line.rpartition("; titanlab sync ")
    assert command.removeprefix("--rebuild ") == f"runs/layouts/{run.path.name}"
    return text


def test_a_run_without_trackers_lacks_nothing(run):
    assert tracker_gap(run) is None
    attempt(run, [1, 2])
    assert tracker_gap(run) is None
    assert waiting_files(run) == []
    assert not has_repeated_steps(run)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"state": OPEN, "step": 2}, "wandb: has at least the steps up to 2 of 4"),
        ({"state": OPEN, "step": 4}, "wandb: was not closed, and may lack the last rows"),
        ({"state": OPEN}, "wandb: may lack all 4 steps"),
        ({"state": FINISHED, "left_out": 3}, "wandb: lacks 3 rows, because the tracker could not keep up"),
        ({"state": FINISHED, "left_out": 0}, None),
    ],
)
def test_a_tracker_that_was_cut_off_is_one_line(run, record, line):
    attempt(run, [1, 2, 3, 4], **record)
    assert gap(run) == line


def test_a_rebuild_makes_up_for_the_attempts_before_it(run):
    attempt(run, [1, 2], state=OPEN, step=1)
    rebuilt = Record(kind="wandb", state=OPEN, attempt=1, rebuilt=True)
    write_record(run.path / RECORD_FILE, rebuilt)
    # It was cut off itself.
    assert gap(run) == "wandb: has at least the steps up to 1 of 2"
    write_record(run.path / RECORD_FILE, replace(rebuilt, state=FINISHED))
    assert tracker_gap(run) is None
    attempt(run, [3], resumed_step=2, state=OPEN)
    assert gap(run) == "wandb: may lack all 3 steps"


def test_an_upload_that_was_asked_for_waits(run):
    attempt(run, [1], state=FINISHED, wanted="online", mode="offline", folder="wandb/offline-run-1-x")
    path = file(run, "wandb/offline-run-1-x")
    assert gap(run) == "wandb: written offline, not uploaded"
    path.with_name("run-x.wandb.synced").write_text("")
    assert tracker_gap(run) is None


def test_files_wait_in_the_order_of_attempts_and_not_of_clocks(run):
    """Two hosts: the clock of the second is behind."""
    for number, folder in enumerate(("wandb/offline-run-2026-x", "wandb/offline-run-2025-x")):
        attempt(run, [number + 1], resumed_step=number, state=FINISHED, mode="offline", folder=folder)
    paths = [file(run, "wandb/offline-run-2026-x"), file(run, "wandb/offline-run-2025-x")]
    file(run, "wandb/offline-run-2024-x", is_uploaded=True)
    assert waiting_files(run) == paths


def test_an_online_start_waits_only_if_it_was_cut_off(run):
    attempt(run, [1], state=FINISHED, mode="online", folder="wandb/run-1-x")
    attempt(run, [2], resumed_step=1, state=OPEN, mode="online", folder="wandb/run-2-x")
    file(run, "wandb/run-1-x")
    cut = file(run, "wandb/run-2-x")
    assert waiting_files(run) == [cut]


@pytest.mark.parametrize("folder", ["../other", "..", "/elsewhere", "wandb/../../other"])
def test_files_outside_of_the_run_are_never_uploaded(run, tmp_path, folder):
    """A record may be a stranger's."""
    folder = str(tmp_path) + folder if folder.startswith("/") else folder
    attempt(run, [1], state=OPEN, mode="online", folder=folder)
    (run.path / folder).mkdir(parents=True, exist_ok=True)
    (run.path / folder / "run-x.wandb").write_text("")
    assert waiting_files(run) == []
    assert gap(run) == "wandb: may lack all 1 steps"


@pytest.mark.parametrize(("resumed_step", "repeats"), [(4, False), (3, True), (0, True)])
def test_steps_that_two_attempts_have_are_noticed(run, resumed_step, repeats):
    attempt(run, [1, 2, 3, 4], state=FINISHED, step=4, mode="offline", folder="wandb/offline-run-1-x")
    steps = range(resumed_step + 1, resumed_step + 3)
    attempt(
        run, steps, resumed_step=resumed_step, state=FINISHED, step=6, mode="offline", folder="wandb/offline-run-2-x"
    )
    file(run, "wandb/offline-run-1-x")
    second = file(run, "wandb/offline-run-2-x")
    assert has_repeated_steps(run) is repeats
    second.with_name("run-x.wandb.synced").write_text("")
    # One file alone repeats nothing.
    assert not has_repeated_steps(run)


# The id of a run in trackers: fixed when its folder is made, and kept


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

"""`titanlab sync`: what is uploaded, and what is in the way of it."""

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sweep.made import Made, begin, end, train
from tests.tracker.test_wandb import inspect
from tests.train.recording.test_rebuild import again, tracked
from titanlab.techniques.tracker import wandb as wandb_upload
from titanlab.techniques.tracker.contract import FINISHED, RECORD_FILE, Record, read_record, write_record
from titanlab.techniques.tracker.trackers_schema import Wandb
from titanlab.techniques.tracker.wandb import offline_files


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    return Made(tmp_path / "runs")


def offline(made, name):
    """A run whose file waits to be uploaded."""
    folder = "wandb/offline-run-20260101_000000-x"
    run = tracked(made, Wandb(), name=name, state=FINISHED, wanted="online", mode="offline", folder=folder)
    end(run)
    file = run.path / folder / "run-x.wandb"
    file.parent.mkdir(parents=True)
    file.write_text("")
    return run, file


@pytest.fixture
def uploads(monkeypatch):
    """The files that wandb's own command is given; it marks them, as the real one does."""
    given = []
    fails = SimpleNamespace(now=False)

    def run(command, **_):
        assert command[2:6] == ["-m", "wandb", "sync", "--include-online"]
        given.extend(map(Path, command[6:]))
        for path in () if fails.now else map(Path, command[6:]):
            path.with_name(f"{path.name}.synced").touch()

    monkeypatch.setattr(wandb_upload, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    monkeypatch.setattr(wandb_upload.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return given, fails


def test_runs_and_sweeps_are_uploaded_once(made, say, uploads):
    (first, one), (_, two) = offline(made, "a"), offline(made, "b")
    assert f"{first.path.name}: wandb: written offline, not uploaded" in say("status", "layouts")[1]
    assert say("sync", first.path.name) == (0, "uploading 1 file of wandb's\n", "")
    assert uploads[0] == [one]
    assert say("sync", "layouts", first.path.name)[0] == 0
    assert uploads[0] == [one, two]
    assert say("sync", "layouts") == (0, "there is nothing to upload\n", "")
    assert "not uploaded" not in say("status", "layouts")[1]


def test_an_upload_that_fails_is_no_success(made, say, uploads):
    run, file = offline(made, "a")
    uploads[1].now = True
    assert say("sync", run.path.name)[::2] == (1, f"error: wandb has not uploaded {file.resolve()}\n")


def test_one_that_went_online_and_was_cut_short_is_uploaded_too(made, say, uploads):
    run, file = offline(made, "a")
    online = file.parent.with_name("run-20260101_000000-x")
    file.parent.rename(online)
    record = read_record(run.attempt_folder(1) / RECORD_FILE)
    cut = dataclasses.asdict(record) | {"state": "open", "mode": "online", "folder": f"wandb/{online.name}"}
    write_record(run.attempt_folder(1) / RECORD_FILE, Record(**cut))
    code, out, _ = say("sync", run.path.name)
    assert code == 0
    assert "titanlab sync --rebuild" in out
    assert uploads[0] == [online / file.name]


def test_no_key_and_no_network_are_a_line_each(made, say, monkeypatch):
    run, _ = offline(made, "a")
    monkeypatch.setattr(
        "titanlab.train.rebuild", lambda run, tracker: [read_record(run.attempt_folder(1) / RECORD_FILE)]
    )
    code, _, err = say("sync", run.path.name)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: WANDB_API_KEY=null: no API key of wandb was found; make one known")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    code, _, err = say("sync", run.path.name)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: WANDB_BASE_URL=http://127.0.0.1:9: cannot be reached (")
    # What was asked for first is done.
    code, out, _ = say("sync", "--rebuild", run.path.name)
    assert code == 0
    assert f"{run.path.name}: wandb has all 0 rows: wandb/offline-run-" in out
    assert "\nnot uploaded: WANDB_BASE_URL=" in out


def test_of_a_sweep_only_what_lacks_something_is_rebuilt(made, say, monkeypatch):
    offline(made, "a")
    monkeypatch.setattr(
        "titanlab.train.rebuild", lambda run, tracker: [read_record(run.attempt_folder(1) / RECORD_FILE)]
    )
    lacking = tracked(made, Wandb(), name="b")
    end(lacking)
    _, out, _ = say("sync", "--rebuild", "layouts")
    assert [line.split(":")[0] for line in out.splitlines() if "has all" in line] == [lacking.path.name]


def resumed(made, *, behind):
    """A run of two attempts with a file each; the second began at step 2 + 2, or `behind` that the first had."""
    run, first = offline(made, "a")
    folder = "wandb/offline-run-20250101_000000-x"  # The clock of its host is behind.
    given = {"state": FINISHED, "wanted": "online", "mode": "offline", "folder": folder}
    again(run, Wandb(), range(7 - behind, 9), resumed_step=6 - behind, step=8, **given)
    write_record(
        run.attempt_folder(1) / RECORD_FILE,
        dataclasses.replace(read_record(run.attempt_folder(1) / RECORD_FILE), step=6),
    )
    end(run)
    second = run.path / folder / "run-x.wandb"
    second.parent.mkdir(parents=True)
    second.write_text("")
    return run, first, second


def test_files_of_one_run_go_up_one_by_one_in_the_order_of_their_steps(made, say, uploads):
    _, first, second = resumed(made, behind=0)
    _, other = offline(made, "b")
    code, out, _ = say("sync", "layouts")
    assert (code, out) == (0, "uploading 3 files of wandb's\n")
    # One command takes a file of each run.
    assert uploads[0] == [first, other, second]


def test_after_a_file_that_fails_the_later_ones_of_its_run_wait(made, say, uploads):
    run, first, _ = resumed(made, behind=0)
    uploads[1].now = True
    assert say("sync", run.path.name)[0] == 1
    assert uploads[0] == [first]


def test_attempts_that_went_over_the_same_steps_are_merged_first(made, say, uploads, monkeypatch):
    run, first, second = resumed(made, behind=2)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    code, out, _ = say("sync", run.path.name)
    assert code == 0
    assert f"{run.path.name}: several attempts logged the same steps; their files are merged into one\n" in out
    assert f"{run.path.name}: wandb has all " in out
    (file,) = uploads[0]
    assert file not in (first, second)
    assert file.parent.name.endswith(f"-{run.identity().tracker_id}")
    assert not first.exists()
    assert not second.exists()


def test_a_run_that_cannot_be_merged_waits_and_the_others_go_up(made, say, uploads, monkeypatch):
    # Only for runs that may be writing their files themselves is sync patient.
    monkeypatch.delattr("titanlab.cli.trackers._WRITING_SECONDS")
    run, first, second = resumed(made, behind=2)
    _, other = offline(made, "b")
    with run.claim():
        code, _, err = say("sync", "layouts")
    assert code == 1
    assert err.startswith(f"warning: {run.path.name} is not uploaded: run=")
    assert uploads[0] == [other]
    assert first.exists()
    assert second.exists()


def test_without_a_key_nothing_is_merged(made, say):
    run, first, second = resumed(made, behind=2)
    assert say("sync", run.path.name)[0] == 2
    assert first.exists()
    assert second.exists()


def test_a_run_that_ended_without_a_tracker_gets_its_files_afterwards(made, say, monkeypatch):
    """After `make quickstart` no way led to wandb: sync and sync --rebuild said that there is nothing to upload."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = made.run("fsdp", shard=2)
    begin(run)
    train(run)
    end(run)
    waiting = made.run("later", shard=2)
    begin(waiting)
    assert say("sync", run.path.name)[1] == (
        "there is nothing to upload\n1 run without files of wandb; write them from metrics.jsonl: "
        f"titanlab sync --tracker wandb {run.path.name}\n"
    )
    code, out, err = say("sync", "--tracker", "wandb", "layouts")
    assert (code, err) == (0, "")
    assert f"{waiting.path.name}: has not ended, or has no rows; nothing is written for wandb\n" in out
    count = len([row for row in run.metrics() if row["kind"] != "experts"])
    assert f"{run.path.name}: wandb has all {count} rows: wandb/offline-run-" in out
    assert "not uploaded: WANDB_API_KEY=" in out
    (file,) = offline_files(run.path)
    rows = [each["history"]["item"] for each in inspect(run.path) if each["type"] == "history"]
    assert [row["_step"] for row in rows] == sorted({row["step"] for row in run.metrics()})
    # Once is enough, and TensorBoard stands beside it.
    say("sync", "--tracker", "wandb", "layouts")
    assert offline_files(run.path) == [file]
    assert "tensorboard has all" in say("sync", "--tracker", "tensorboard", run.path.name)[1]
    assert {path.name for path in run.path.glob("tracker*.json")} == {"tracker-wandb.json", "tracker-tensorboard.json"}

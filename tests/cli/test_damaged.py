"""Runs whose files are damaged, of another version, or another person's: a line for each, and the others are shown."""

import json
import os
import subprocess
import sys

import pytest

from tests import tiny
from tests.sweep.made import Made, begin, end, train
from titanlab.checkpoint.folders import step_folder
from titanlab.launch import JobState
from titanlab.records import RunFolder
from titanlab.sweep import SweepFolder
from titanlab.sweep import reconcile as reconciling


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A sweep of a damaged run `bad`, which has a checkpoint, and one that is whole."""
    monkeypatch.chdir(tmp_path)
    sweep = Made(tmp_path / "runs")
    bad, good = sweep.run("bad", shard=2), sweep.run("good", tensor=2)
    for run in (bad, good):
        begin(run)
        train(run)
        end(run, "crash", cause="planted")
    tiny.write_checkpoint(step_folder(bad.checkpoints, 4), {"step": 4, "parameters": {}})
    return sweep, bad, good


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGE = {
    "another schema": ("identity.json", {"schema": 7}, "schema=7: ", "use the version that made it"),
    "no hash": ("identity.json", {"sha256": 5}, "sha256=5: expected `str`, got `int` in ", "restore that file"),
    "identity torn": ("identity.json", '{"schema": 1, "sha', "run=", "is not JSON"),
    "status torn": ("status.json", '{"state": "run', "run=", "remove that file: it is written anew"),
    "an unknown state": (
        "status.json",
        {"state": "flying"},
        "state=flying: invalid enum value 'flying' in ",
        "remove that file",
    ),
    "a result of other types": (
        "result.json",
        {"metrics": 3},
        "metrics=3: expected `object`, got `int` in ",
        "restore that file",
    ),
    "no text": ("result.json", b"\xff\xfe\x00", "run=", "is not JSON"),
}
VERBS = (
    *("resume bad", "generate bad", "export bad --into out", "sync --rebuild bad"),
    *("status layouts bad", "retry layouts bad", "cancel layouts bad"),
)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named_and_hides_no_other_run(made, say, name):
    _, bad, good = made
    file, content, begins, cure = DAMAGE[name]
    path = bad.path / file
    if isinstance(content, dict):
        changed(path, **content)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for verb in VERBS:
        code, out, err = say(*verb.split())
        assert (code, err.count("\n")) == (2, 1), (verb, out, err)
        assert err.startswith(f"error: {begins}"), verb
        assert file in err
        assert cure in err, verb
    rows = {row["run"]: row for row in json.loads(say("status", "layouts", "--json")[1])}
    assert (rows[bad.path.name]["state"], rows[good.path.name]["outcome"]) == ("unreadable", "crash")
    assert file in rows[bad.path.name]["cause"]
    code, out, err = say("collect", "layouts")
    assert (code, err) == (0, "")
    assert f"{bad.path.name}: unreadable: " in out
    if file == "status.json":
        assert "1 unreadable" in say("status")[1]
    # The other runs of a sweep are handled.
    code, out, _ = say("retry", "layouts", "--all-failed", "--dry-run")
    assert code == 0
    assert f"{bad.path.name} is left alone: {begins}" in out
    assert "1 run would be submitted" in out
    code, out, _ = say("cancel", "layouts")
    assert (code, "layouts: 1 ended before" in out) == (0, True)


@pytest.mark.parametrize("key", ["newer_key", "training.newer_key", "model.newer_key"])
def test_an_unknown_key_names_the_file(made, say, key):
    _, bad, _ = made
    path = bad.path / "config.yaml"
    group, _, name = key.rpartition(".")
    lines = path.read_text().splitlines()
    place = lines.index(f"{group}:") + 1 if group else len(lines)
    path.write_text("\n".join([*lines[:place], f"{'  ' if group else ''}{name}: 3", *lines[place:]]) + "\n")
    verbs = ["resume bad", "retry layouts bad", "resume bad tracker=jsonl", "export bad --into out"]
    # An export needs the model only.
    for verb in verbs[:2] if group != "model" else [*verbs[:2], verbs[3]]:
        code, out, err = say(*verb.split())
        assert (code, err.count("\n")) == (2, 1), (verb, out, err)
        assert "newer_key" in err
        assert "config.yaml" in err, verb
    assert say("status", "layouts")[0] == 0


def test_a_key_that_is_typed_is_not_blamed_on_the_file(made, say):
    _, _, good = made
    _, _, err = say("resume", good.path.name, "tracker.nothing=1")
    assert err.startswith("error: tracker.nothing=1: ")
    assert "config.yaml" not in err


# Another person's folder: for root, permissions count once its own rights over them are given up.
OTHERS = """
import ctypes, os, sys
for right in (1, 2, 3): ctypes.CDLL(None).prctl(24, right, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "titanlab", *sys.argv[1:]])
"""


def as_another(*arguments):
    return subprocess.run(
        [sys.executable, "-c", OTHERS, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def others(made):
    """The sweep, which nobody may write any more; of a job that has ended, a run has no result."""
    sweep, bad, good = made
    (good.path / "result.json").unlink()
    (good.path / "status.json").unlink()
    # Its process is dead.
    train(good, pid=2**22 + 1)
    sweep.submit(good, launcher="local", job_id="x")
    token = next((sweep.folder.path / "submissions").glob("*.json")).stem
    job = {"token": token, "index": 0, "nodes": [os.uname().nodename], "started": 1.0}
    (good.attempt_folder(1) / "job.json").write_text(json.dumps(job))
    made_folders = [sweep.folder.path, *(path for path in sweep.folder.path.rglob("*") if path.is_dir())]
    for path in made_folders:
        path.chmod(0o555)
    yield sweep, bad, good
    for path in made_folders:
        path.chmod(0o755)


def test_whoever_may_only_read_is_shown_all_and_told_what_cannot_be_noted(others):
    _, bad, good = others
    done = as_another("status", "layouts")
    assert done.returncode == 0, done.stderr
    assert bad.path.name in done.stdout
    assert good.path.name in done.stdout
    assert done.stderr.count("\n") == 1
    assert (
        f"1 run ended without a result, and no result can be written: {good.path.name} cannot be written" in done.stderr
    )
    assert not (good.path / "result.json").exists()


@pytest.mark.parametrize(
    "verb", ["cancel layouts", "sync --rebuild bad", pytest.param("collect layouts", marks=pytest.mark.full)]
)
def test_what_must_write_says_in_a_line_that_it_cannot(others, verb):
    done = as_another(*verb.split())
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "no result can be written" not in line]
    assert len(lines) == 1
    assert "cannot be written (" in lines[0]
    assert "Permission denied" in lines[0]


def test_a_folder_that_may_not_be_looked_into_hides_no_other(made):
    _, bad, good = made
    bad.path.chmod(0)
    try:
        done = as_another("status", "layouts", "--json")
        assert done.returncode == 0, done.stderr
        states = {row["run"]: row["state"] for row in json.loads(done.stdout)}
        assert states[good.path.name] == "ended"
    finally:
        bad.path.chmod(0o755)


def test_a_folder_that_goes_while_it_is_read(made, monkeypatch):
    sweep, bad, _ = made
    submission = sweep.submit(bad, launcher="local")
    monkeypatch.setattr(
        reconciling, "job_states", lambda *_: {(submission.token, 0): JobState(state="gone", raw=None, reason=None)}
    )

    def gone(self, **_):
        raise FileNotFoundError(2, "No such file or directory")

    (bad.path / "result.json").unlink()
    monkeypatch.setattr(RunFolder, "claim", gone)
    told = []
    reconciling.reconcile(SweepFolder(sweep.folder.path), told.append)
    assert len(told) == 1
    assert "No such file" in told[0]

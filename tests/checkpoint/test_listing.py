"""The checkpoints of a run as rows, and `titanlab checkpoints` and `titanlab resume --step`."""

import json
import shutil
import time

import pytest

from tests import tiny
from tests.checkpoint.test_damage import flipped, loaded
from titanlab.checkpoint.folders import step_folder
from titanlab.cli import main
from titanlab.records import RunFolder


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A run that has saved steps 2 and 4."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=4, every=2, keep=0)
    run = tiny.begin(made)
    pool.run(1, loaded, tiny.changed(made, steps=2), run)
    tiny.begin(made, run)
    pool.run(1, four_steps, made, run)
    (run.path / "result.json").unlink()
    return run


def four_steps(made, run):
    return tiny.as_rank(made, run).step


@pytest.fixture
def run(saved, tmp_path):
    return RunFolder(shutil.copytree(saved.path, tmp_path / "runs" / "single" / saved.path.name))


@pytest.fixture
def call(capsys):
    def call(*arguments):
        code = main(list(map(str, arguments)))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def rows(call, run, *more):
    code, out, _ = call("checkpoints", run.path, "--json", *more)
    return code, {row["name"]: row for row in json.loads(out)}


def test_whole_checkpoints_are_listed_and_verified(run, call):
    code, out, err = call("checkpoints", run.path)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["step", "2", "4"]
    assert out.count("  complete") == 2
    code, found = rows(call, run)
    assert (code, list(found)) == (0, ["step-00000002", "step-00000004"])
    row = found["step-00000004"]
    folder = step_folder(run.checkpoints, 4)
    assert row["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (row["step"], row["state"], row["verified"], row["problem"]) == (
        4, "complete", None, None,
    )  # fmt: skip
    assert 0 <= time.time() - row["saved"] < 10_000
    code, out, _ = call("checkpoints", run.path, "--verify")
    assert (code, out.count("complete, verified")) == (0, 2)
    assert all(row["verified"] for row in rows(call, run, "--verify")[1].values())


def test_a_damaged_byte_is_found_by_reading_all(run, call):
    path = step_folder(run.checkpoints, 4) / "rank-00000.safetensors"
    path.write_bytes(flipped(path.read_bytes(), 50_000))
    assert rows(call, run)[0] == 0
    code, found = rows(call, run, "--verify")
    assert (code, found["step-00000002"]["verified"], found["step-00000004"]["verified"]) == (1, True, False)
    assert found["step-00000004"]["state"] == "damaged"
    code, out, err = call("checkpoints", run.path, "--verify")
    assert (code, err) == (1, "")
    assert "its file rank-00000.safetensors has other bytes than were saved, in its block 0 of 1 MiB" in out


def test_lost_files_are_found_without_reading_all(run, call):
    (step_folder(run.checkpoints, 4) / "index.json").unlink()
    code, found = rows(call, run)
    assert (code, found["step-00000004"]["problem"]) == (1, "is damaged: its file index.json is missing")


def test_other_folders_are_listed_as_what_they_are(run, call):
    for name in ("step-00000005.part", "step-00000006.aside", "step-00000007.damaged-2", "notes", "step-00000008"):
        (run.checkpoints / name).mkdir()
    code, found = rows(call, run, "--verify")
    assert code == 0
    assert {name: (row["state"], row["verified"]) for name, row in found.items()} == {
        "step-00000002": ("complete", True),
        "step-00000004": ("complete", True),
        "step-00000005.part": ("unfinished", None),
        "step-00000006.aside": ("put aside", None),
        "step-00000007.damaged-2": ("damaged", None),
    }


def test_a_run_without_checkpoints_says_so(run, call):
    shutil.rmtree(run.checkpoints)
    code, out, _ = call("checkpoints", run.path)
    assert (code, out.strip().endswith("has no checkpoints")) == (0, True)
    assert call("checkpoints", run.path, "--json")[1].strip() == "[]"

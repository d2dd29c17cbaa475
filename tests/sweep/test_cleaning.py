"""What can be removed: of a run, of a folder of runs, of the caches; and what is left alone."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests import tiny
from tests.checkpoint.test_folders import made as saved
from tests.sweep.conftest import quiet
from tests.sweep.made import Made, begin, end
from titanlab.sweep import Refused, Removable, Survey, remove_item
from titanlab.sweep.clean import YOUNG_SECONDS, is_within, item, removable, starting_points


def test_paths_outside_the_root_are_refused(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    assert is_within(root / "a", root)
    assert not is_within(root, root)
    assert not is_within(tmp_path / "b", root)
    assert not is_within(root / ".." / "b", root)
    assert not is_within(root / "link" / "b", root)
    (root / "dangling").symlink_to("nowhere")
    for path in (root / "link", root / "dangling", root / "gone", tmp_path / "b", root):
        assert item("temporary", path, root) is None
    (tmp_path / "b").write_text("x")
    for path in (tmp_path / "b", root / "link" / "b"):
        with pytest.raises(Refused):
            remove_item(Removable(kind="temporary", path=path, root=root, bytes=1))
    remove_item(Removable(kind="temporary", path=root / "gone", root=root, bytes=1))
    assert (tmp_path / "b").exists()


def test_a_run_that_begins_meanwhile_is_left_alone(tmp_path):
    run = Made(tmp_path / "runs").run("a")
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    checkpoint = run.checkpoints / "step-00000002"
    found = Removable(kind="checkpoints", path=checkpoint, root=run.path.parents[1], bytes=1, run=run)
    ready, done = threading.Event(), threading.Event()

    def work():
        with run.claim():
            ready.set()
            done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    with pytest.raises(Refused, match="is locked by"):
        remove_item(found)
    done.set()
    thread.join()
    assert checkpoint.is_dir()


def test_a_folder_is_removed_with_its_links_and_not_what_they_lead_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    remove_item(Removable(kind="temporary", path=tmp_path / "a", root=tmp_path, bytes=1))
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_what_has_become_a_link_is_refused(tmp_path):
    (tmp_path / "kept").write_text("x")
    found = Removable(kind="temporary", path=tmp_path / "a", root=tmp_path, bytes=1)
    (tmp_path / "a").symlink_to("kept")
    with pytest.raises(Refused, match="it is a link now, or lies elsewhere"):
        remove_item(found)
    assert sorted(os.listdir(tmp_path)) == ["a", "kept"]


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2, 4, 6 and 8, which has not ended; its recipe keeps two."""
    made = Made(tmp_path / "runs").run("a", keep=2)
    begin(made)
    made.checkpoints.mkdir(exist_ok=True)
    for step in (2, 4, 6, 8):
        saved(made.checkpoints, step)
    return made


def goes(run, *, keep=None):
    return [row.step for row in removable(run, run.checkpoints, keep=keep, verifies=False)]


def test_what_a_run_can_go_on_from_stays(run):
    content = {"step": 8, "parameters": {"a.weight": [2, 3]}, "contents": "model"}
    tiny.write_checkpoint(run.checkpoints / "step-00000008", content)
    assert goes(run, keep=1) == [2, 4]
    # Without a whole one nothing goes: a person may still mend one.
    for step in (2, 4, 6, 8):
        (run.checkpoints / f"step-0000000{step}" / "position.json").write_text("{")
    assert goes(run, keep=1) == []


def aged(path):
    old = time.time() - 2 * YOUNG_SECONDS
    for each in [*path.rglob("*"), path]:
        os.utime(each, (old, old), follow_symlinks=False)
    return path


def with_checkpoints(made, name="a", steps=(2, 4, 6), **given):
    run = made.run(name, keep=1, **given)
    begin(run)
    run.checkpoints.mkdir(exist_ok=True)
    for step in steps:
        saved(run.checkpoints, step)
    # Else its status is young, and it may be at work elsewhere.
    end(run, "crash")
    return run


def config(run, before, after):
    path = run.path / "config.yaml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize("text", ["null-hypothesis/a", "~nobody99/x"])
def test_a_start_whose_name_begins_with_null_is_one(made, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config(made.run("a"), "load_from: null", f"load_from: {text}")
    assert starting_points(made.folder.path.parent) == {str(tmp_path / text)}


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint: [1]\nother:\n  load_from: /a\n",
        "init_from: [/a]\n",
        "init_from: /a/ring/x\n",
        b"init_from: \xff\n",
        "init_from: /a\n" + "# x\n" * 300_000,
        None,
    ],
    ids=["list", "no text", "ring", "no UTF-8", "huge", "pipe"],
)
def test_a_damaged_config_hides_no_start_of_others(made, text, tmp_path):
    config(made.run("good"), "load_from: null", "load_from: /good")
    path = made.run("bad", seed=1).path / "config.yaml"
    path.unlink()
    if text is None:
        # A plain open of a pipe would wait for a writer for ever.
        os.mkfifo(path)
    else:
        (tmp_path / "ring").symlink_to(tmp_path / "ring")
        text = text.replace("/a/ring", str(tmp_path / "ring")) if isinstance(text, str) else text
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert starting_points(made.folder.path.parent) == {"/good"}


def test_a_sweep_whose_plan_is_damaged_is_left_alone_and_the_others_are_not(made, tmp_path, monkeypatch):
    """Which of its runs have jobs is not known."""
    with_checkpoints(made)
    with_checkpoints(other := Made(tmp_path / "runs", "other"))
    for each in (made, other):
        each.write()
    monkeypatch.setattr(type(made.folder), "submissions", lambda folder: ["a job"] if folder.name == "layouts" else [])
    monkeypatch.setattr("titanlab.sweep.clean.look_at", lambda sweep, report: sweep.points)
    (made.folder.path / "points.jsonl").write_text("{")
    found = Survey(root=made.folder.path.parent)
    found.look([made.folder, other.folder], None, quiet)
    (note,) = found.notes
    assert note.startswith("layouts is left alone: sweep=")
    assert {item.path.relative_to(found.root).parts[0] for item in found.items} == {"other"}

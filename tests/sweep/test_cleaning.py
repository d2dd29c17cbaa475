"""What can be removed: of a run, of a folder of runs, of the caches; and what is left alone."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time

import pytest

from tests import tiny
from tests.checkpoint.test_folders import made as saved
from tests.sweep.conftest import quiet
from tests.sweep.made import Made, begin, end
from titanlab.records import RECORD, Status
from titanlab.sweep import Refused, Removable, Survey, cached, clean, remove_item
from titanlab.sweep.clean import (
    YOUNG_SECONDS,
    is_old,
    is_within,
    item,
    removable,
    size_of_tree,
    starting_points,
)


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
            done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    with pytest.raises(Refused, match="is in the hands of"):
        remove_item(found)
    done.set()
    thread.join()
    assert checkpoint.is_dir()


def test_the_size_is_that_of_files_and_links_count_nothing(tmp_path):
    folder = tmp_path / "a"
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "one").write_bytes(bytes(10))
    (folder / "b" / "c" / "two").write_bytes(bytes(7))
    (tmp_path / "large").write_bytes(bytes(1000))
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "b" / "up").symlink_to(folder, target_is_directory=True)
    assert size_of_tree(folder) == 17
    assert size_of_tree(folder / "one") == 10
    assert size_of_tree(folder / "link") == 0
    assert size_of_tree(tmp_path / "gone") == 0
    (tmp_path / "empty").mkdir()
    assert size_of_tree(tmp_path / "empty") == 0


def test_what_cannot_be_looked_at_has_no_size(tmp_path, monkeypatch):
    """A user of a shared folder of runs may not look into folders of others."""

    def refuse(path, *args, **named):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refuse)
        patched.setattr(os, "stat", refuse)
        size = size_of_tree(tmp_path / "of others")
    assert size == 0


def touch(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def test_what_was_not_written_to_for_an_hour_is_old(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "inner").write_text("")
    touch(folder / "inner", 2 * YOUNG_SECONDS)
    touch(folder, 2 * YOUNG_SECONDS)
    assert is_old(folder)
    touch(folder / "inner", 0)
    assert not is_old(folder)
    assert not is_old(tmp_path / "gone")


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


def rules(run, **given):
    path = run.path / "config.yaml"
    text = path.read_text()
    for key, value in given.items():
        before = {"keep": "keep: 2", "keep_every": "keep_every: 0"}[key]
        assert before in text
        text = text.replace(before, f"{key}: {value}")
    path.write_text(text)


def goes(run, *, keep=None):
    return [row.step for row in removable(run, run.checkpoints, keep=keep, verifies=False)]


@pytest.mark.parametrize(
    ("given", "kind", "gone"),
    [
        ({"keep": 1}, None, [2, 4, 6]),
        # Zero: all of them.
        ({"keep": 0}, "done", []),
        ({"keep_every": 4}, None, [2]),
        ({"keep": 1, "keep_every": 100}, None, [2, 4, 6]),
        # No number of a recipe.
        ({"keep": "x"}, None, []),
        ({"keep_every": "yes"}, None, [2, 4]),
        # Of a run that is done, one stays.
        ({}, "done", [2, 4, 6]),
        ({}, "preempted", [2, 4]),
    ],
)
def test_rules_of_the_recipe(run, given, kind, gone):
    rules(run, **given)
    if kind is not None:
        end(run, kind)
    assert goes(run) == gone


def test_what_a_run_can_go_on_from_stays(run):
    content = {"step": 8, "parameters": {"a.weight": [2, 3]}, "contents": "model"}
    tiny.write_checkpoint(run.checkpoints / "step-00000008", content)
    assert goes(run, keep=1) == [2, 4]
    # Without a whole one nothing goes: a person may still mend one.
    for step in (2, 4, 6, 8):
        (run.checkpoints / f"step-0000000{step}" / "position.json").write_text("{")
    assert goes(run, keep=1) == []


def survey(made, **given):
    """What is found in a sweep, as kinds with paths below the folder of runs."""
    found = Survey(root=made.folder.path.parent, **given)
    found.look([made.folder], None, quiet)
    return found


def found_by_kind(found):
    return [(item.kind, str(item.path.relative_to(found.root))) for item in found.items]


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


@pytest.mark.parametrize("age", [0.0, 800.0, 1000.0])
def test_a_run_that_has_written_its_status_lately_may_work_on_another_host(made, age):
    run = with_checkpoints(made)
    status = Status(state="running", step=6, steps=10, attempt=1, metrics={}, updated=time.time() - age)
    run.write_status(status)
    path = run.path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "updated": time.time() - age}))
    found = survey(made)
    assert (found.busy, len(found.items)) == (([f"layouts/{run.path.name}"], 0) if age < 900 else ([], 2))


def test_links_are_noted_and_not_followed(made, tmp_path):
    run = with_checkpoints(made)
    outside = tmp_path / "outside"
    run.path.rename(outside)
    run.path.symlink_to(outside)
    found = Survey(root=made.folder.path.parent)
    found.look([made.folder], run, quiet)
    assert found_by_kind(found) == []
    assert found.notes == [f"layouts/{run.path.name} is a link, and is left alone"]


@pytest.mark.parametrize("key", ["load_from", "init_from"])
@pytest.mark.parametrize(
    ("which", "left"),
    [
        ("checkpoints/step-00000002", {"step-00000004"}),
        # A name with which another one only begins.
        ("checkpoints/step-0000000", {"step-00000002", "step-00000004"}),
        ("checkpoints/", set()),
        ("", set()),
    ],
)
def test_what_another_run_starts_from_stays(made, key, which, left):
    run = with_checkpoints(made)
    child = made.run("child", seed=1)
    config(child, f"{key}: null", f"{key}: {run.path}/{which}")
    assert {item.path.name for item in survey(made).items} == left


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


@pytest.mark.parametrize("section", ["checkpoint: [1]", "checkpoint: text"])
def test_a_run_whose_section_is_damaged_is_noted_and_hides_no_other(made, section):
    good, bad = with_checkpoints(made, "good"), with_checkpoints(made, "bad", seed=1)
    path = bad.path / "config.yaml"
    text = path.read_text()
    begins = text.index("\ncheckpoint:") + 1
    lines = text[begins:].splitlines(keepends=True)
    rest = next(place for place, line in enumerate(lines[1:], 1) if not line.startswith(" "))
    path.write_text(f"{text[:begins]}{section}\n{''.join(lines[rest:])}")
    found = survey(made)
    assert {item.run.path.name for item in found.items} == {good.path.name}
    (note,) = found.notes
    assert note.startswith(f"layouts/{bad.path.name} is left alone: ")


def superseded(made, run):
    folder = made.folder.superseded / "a-0123abcd-1"
    folder.parent.mkdir(parents=True, exist_ok=True)
    run.path.rename(folder)
    return folder


def test_superseded_runs_lose_their_bulk_unless_a_run_starts_from_it(made):
    run = with_checkpoints(made)
    (run.path / "traces").mkdir(exist_ok=True)
    folder = superseded(made, run)
    assert found_by_kind(survey(made)) == [
        ("superseded", str(folder.relative_to(made.folder.path.parent) / "checkpoints"))
    ]
    config(made.run("child", seed=1), "init_from: null", f"init_from: {folder / 'checkpoints' / 'step-00000002'}")
    assert found_by_kind(survey(made)) == []


def snapshot(made, name="c0de", fingerprint="f1"):
    folder = made.folder.code / name
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"fingerprint": fingerprint}))
    return aged(folder)


def code_of(run, code):
    path = run.path / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "code": code}))


@pytest.mark.parametrize(
    ("code", "goes"),
    [
        ({"fingerprint": "f1", "git": {"sha": "1", "patch_complete": True}}, True),
        ({"fingerprint": "f1", "git": {"sha": "1", "patch_complete": False}}, False),
        ({"fingerprint": "f1", "git": None}, False),
        ({"fingerprint": ["f1"]}, True),
    ],
)
def test_the_only_copy_of_a_runs_code_stays(made, code, goes):
    run = made.run("a")
    begin(run)
    end(run)
    code_of(run, code)
    snapshot(made)
    assert [item.kind for item in survey(made).items] == ["code"] * goes


@pytest.mark.parametrize("kind", ["preempted", None])
def test_code_of_a_run_that_goes_on_by_itself_stays(made, kind):
    run = made.run("a")
    begin(run)
    code_of(run, {})
    made.submit(run, launcher="local", created=1500.0)
    if kind is not None:
        end(run, kind)
    snapshot(made, name="abc")
    snapshot(made, name="other", fingerprint="f2")
    assert [item.path.name for item in survey(made).items] == ["other"]


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


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The cache folder, with one prepared corpus."""
    root = tmp_path / "cache"
    monkeypatch.setenv("TITANLAB_CACHE", str(root))
    monkeypatch.setattr(clean.compile_cache, "own_folder", lambda: tmp_path / "own")
    put(root / "tokens" / "files-abc" / "0.bin", 1000)
    (root / "tokens" / ".files-abc.lock").touch()
    return root


def put(file, size):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def found():
    return [(item.kind, item.path.name, item.bytes) for item in cached()]


def test_prepared_data_and_compiled_code_of_both_places(root, tmp_path):
    put(root / "fingerprints" / "f.json", 7)
    put(tmp_path / "own" / "inductor" / "aa" / "x.so", 5)
    put(root / "inductor" / "y.so", 3)
    put(root / "mine" / "thesis.txt", 9)
    assert found() == [
        ("data-cache", "files-abc", 1000),
        ("data-cache", "f.json", 7),
        ("compile-cache", "inductor", 5),
        ("compile-cache", "inductor", 3),
    ]
    # The parent, and nothing outside of it, is where the removal may take place.
    assert {item.root for item in cached()} == {root, tmp_path / "own"}


def test_what_a_killed_process_has_left_counts_after_an_hour(root):
    left = put(root / "tokens" / ".files-def.making-0a1b2c" / "0.bin", 5).parent
    assert [kind for kind, _, _ in found()] == ["data-cache"]
    aged(left)
    assert found() == [("temporary", ".files-def.making-0a1b2c", 5), ("data-cache", "files-abc", 1000)]


def test_what_a_process_still_makes_is_in_use_however_old_it_is(root):
    """A download of more than an hour, or a tokenizer that writes nothing for so long: it lost its folder."""
    aged(put(root / "tokens" / ".files-def.making-0a1b2c" / "0.bin", 5).parent)
    with open(root / "tokens" / ".files-def.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found() == [("data-cache", "files-abc", 1000)]


def test_links_are_left_alone(root, tmp_path):
    put(tmp_path / "elsewhere" / "inductor" / "x.so", 5)
    (root / "tokens" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "inductor").symlink_to(tmp_path / "elsewhere" / "inductor")
    # Another user may have made it, in a folder for all.
    (tmp_path / "own").symlink_to(tmp_path / "elsewhere")
    assert found() == [("data-cache", "files-abc", 1000)]


def test_a_compile_cache_of_another_user_is_left_alone(root, tmp_path, monkeypatch):
    put(tmp_path / "own" / "inductor" / "x.so", 5)
    monkeypatch.setattr(clean.os, "getuid", lambda: (tmp_path / "own").stat().st_uid + 1)
    assert [kind for kind, _, _ in found()] == ["data-cache"]

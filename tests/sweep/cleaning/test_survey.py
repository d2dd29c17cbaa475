"""What a folder of runs can lose: what is in use, linked, damaged or another run's start is left alone."""

import json
import os
import time

import pytest

from tests.checkpoint.test_contents import made as saved
from tests.sweep.conftest import quiet
from tests.sweep.made import Made, begin, end
from titanlab.records import RECORD, Status
from titanlab.sweep import Survey
from titanlab.sweep.clean import YOUNG_SECONDS, starting_points


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "runs")


def survey(made, **given):
    """What is found in a sweep, as kinds with paths below the folder of runs."""
    found = Survey(root=made.folder.path.parent, **given)
    found.look([made.folder], None, quiet)
    return found


def removable(found):
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


def test_what_a_run_has_left_is_found_by_kind(made):
    run = with_checkpoints(made)
    end(run)
    part = aged(saved(run.checkpoints, 8).rename(run.checkpoints / "step-00000008.part"))
    for path in (run.path / ".status.json.tmp", run.path / "attempts" / "1" / ".env.json.12.tmp"):
        path.write_text("")
        aged(path)
    (run.path / ".young.tmp").write_text("")
    name = f"layouts/{run.path.name}"
    assert removable(survey(made)) == [
        ("checkpoints", f"{name}/checkpoints/step-00000002"),
        ("checkpoints", f"{name}/checkpoints/step-00000004"),
        ("temporary", f"{name}/checkpoints/{part.name}"),
        ("temporary", f"{name}/.status.json.tmp"),
        ("temporary", f"{name}/attempts/1/.env.json.12.tmp"),
    ]


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
    assert removable(found) == []
    assert found.notes == [f"layouts/{run.path.name} is a link, and is left alone"]
    linked = made.folder.path.with_name("linked")
    linked.symlink_to(made.folder.path)
    found = Survey(root=made.folder.path.parent)
    found.look([type(made.folder)(linked)], None, quiet)
    assert (found.items, found.notes) == ([], ["linked is a link, and is left alone"])


@pytest.mark.parametrize("key", ["load_from", "init_from"])
@pytest.mark.parametrize("which", ["checkpoints/step-00000002", "checkpoints", ""])
def test_what_another_run_starts_from_stays(made, key, which):
    run = with_checkpoints(made)
    child = made.run("child", seed=1)
    config(child, f"{key}: null", f"{key}: {run.path / which}")
    left = set() if which != "checkpoints/step-00000002" else {"step-00000004"}
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
    assert removable(survey(made)) == [("superseded", str(folder.relative_to(made.folder.path.parent) / "checkpoints"))]
    config(made.run("child", seed=1), "init_from: null", f"init_from: {folder / 'checkpoints' / 'step-00000002'}")
    assert removable(survey(made)) == []


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

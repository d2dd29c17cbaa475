"""`titanlab clean` removes what no run needs, and nothing else: whatever is damaged, linked, or in use."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.sweep.made import Made, begin, end
from titanlab.cli import status
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status
from titanlab.sweep import clean as items
from titanlab.system import write_json


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A run that has saved steps 2, 4, 6 and 8, and keeps all."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=8, every=2, keep=0)
    run = tiny.begin(made)
    pool.run(1, train, made, run)
    return run


def train(made, run):
    return tiny.as_rank(made, run).step


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    made = RunFolder(shutil.copytree(saved.path, tmp_path / "runs" / "single" / saved.path.name))
    keep(made, 2)
    (made.path / "logs" / "rank-0.log").write_text("text\n")
    return made


@pytest.fixture
def call(say, tmp_path):
    return lambda *words: say("clean", *words, "--runs", tmp_path / "runs")


def keep(run, number, every=0):
    path = run.path / "config.yaml"
    text = path.read_text().replace("keep: 0", f"keep: {number}").replace("keep_every: 0", f"keep_every: {every}")
    path.write_text(text)


def unfinished(run):
    run.write_result(Outcome(kind=OutcomeKind.CRASH, attempt=1, step=8))


def steps(run):
    return sorted(path.name.removeprefix("step-0000000") for path in run.checkpoints.iterdir())


def aged(path):
    old = time.time() - 2 * items.YOUNG_SECONDS
    for each in [path, *path.rglob("*")]:
        os.utime(each, (old, old))
    return path


def everything(folder):
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*")}


def test_a_run_that_is_done_keeps_its_newest_and_all_its_records(run, call):
    def records():
        files = [path for path in run.path.rglob("*") if path.is_file() and run.checkpoints not in path.parents]
        return {str(path): path.read_bytes() for path in files if not path.name.startswith(".")}

    before = records()
    assert {"config.yaml", "metrics.jsonl", "result.json", "rank-0.log"} < {Path(path).name for path in before}
    code, out, err = call("--yes")
    assert (code, err) == (0, "")
    assert "checkpoints      3" in out
    assert out.splitlines()[-1].startswith("removed 3 items, ")
    assert steps(run) == ["8"]
    assert before == records()
    assert call("--yes")[1].startswith("there is nothing to remove")


@pytest.mark.parametrize(
    ("number", "every", "flags", "is_done", "left"),
    [
        (0, 0, [], True, ["2", "4", "6", "8"]),
        (2, 4, [], True, ["4", "8"]),
        (3, 0, ["--keep", "2"], True, ["6", "8"]),
        (0, 0, ["--keep", "1"], True, ["8"]),
        (2, 0, ["--what", "temporary,code"], True, ["2", "4", "6", "8"]),
        (2, 0, [], False, ["6", "8"]),
        (1, 4, [], False, ["4", "8"]),
        # No number of a recipe.
        ("x", 0, [], False, ["2", "4", "6", "8"]),
        (2, "yes", [], False, ["6", "8"]),
    ],
)
def test_rules_and_flags(run, saved, call, number, every, flags, is_done, left):
    shutil.copy(saved.path / "config.yaml", run.path)
    keep(run, number, every)
    if not is_done:
        unfinished(run)
    assert call(*flags, "--yes")[0] == 0
    assert steps(run) == left


def test_a_damaged_newest_checkpoint_keeps_the_one_before_it_and_bytes_are_read_where_asked(run, call):
    (tensors,) = (run.checkpoints / "step-00000008").glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    call("--yes", "--verify", "--keep", "3")
    assert steps(run) == ["2", "4", "6"]
    (run.checkpoints / "step-00000006" / "index.json").write_text("{")
    call("--yes")
    assert steps(run) == ["4"]


def test_what_is_put_aside_and_what_saves_have_left_goes(run, call):
    run.checkpoints.joinpath("step-00000008").rename(run.checkpoints / "step-00000008.aside")
    shutil.copytree(run.checkpoints / "step-00000006", run.checkpoints / "step-00000010.part")
    shutil.copytree(run.checkpoints / "step-00000006", run.checkpoints / "step-00000012.part")
    aged(run.checkpoints / "step-00000010.part")
    old = [run.path / ".status.json.7-0a1b2c3d.tmp", run.attempt_folder(1) / ".a.123-ff.removing"]
    for path in (*old, run.path / "status.json.tmp", run.path / ".a.b.partial"):
        path.write_text("{")
        aged(path)
    (run.path / ".young.tmp").write_text("")
    call("--yes")
    assert steps(run) == ["6", "step-00000012.part"]
    assert not any(path.exists() for path in old)
    assert all((run.path / name).exists() for name in ("status.json.tmp", ".a.b.partial", ".young.tmp"))


def test_a_run_at_work_is_left_alone(run, call):
    with run.claim():
        code, out, _ = call("--yes")
    assert (code, steps(run)) == (0, ["2", "4", "6", "8"])
    assert f"1 run at work or in a queue, left alone: single/{run.path.name}" in out
    run.write_status(Status(state="running", attempt=1, host="another"))
    (run.path / "result.json").unlink()
    call("--yes")
    assert steps(run) == ["2", "4", "6", "8"]


def test_links_are_never_followed(run, call, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run.checkpoints, elsewhere)
    run.checkpoints.symlink_to(elsewhere)
    before = everything(elsewhere)
    code, out, _ = call("--yes")
    assert (code, everything(elsewhere)) == (0, before)
    assert "checkpoints is a link, and is left alone" in out
    run.checkpoints.unlink()
    shutil.move(elsewhere, run.checkpoints)
    shutil.move(run.checkpoints / "step-00000002", elsewhere)
    (run.checkpoints / "step-00000002").symlink_to(elsewhere)
    before = everything(elsewhere)
    call("--yes")
    assert everything(elsewhere) == before
    shutil.move(run.path.parent, tmp_path / "moved")
    (tmp_path / "runs" / "single").symlink_to(tmp_path / "moved")
    before = everything(tmp_path / "moved")
    assert "single is a link, and is left alone" in call("--yes")[1]
    assert everything(tmp_path / "moved") == before


def test_checkpoints_from_which_another_run_starts_stay(run, call):
    child = run.path.parent / "child-0123abcd"
    shutil.copytree(run.path, child, ignore=shutil.ignore_patterns("checkpoints"))
    text = (child / "config.yaml").read_text()
    (child / "config.yaml").write_text(text.replace("load_from: null", f"load_from: {run.checkpoints}/step-00000004"))
    call("--yes")
    assert steps(run) == ["4", "8"]


def test_a_damaged_run_is_left_alone_and_hides_no_other(run, call):
    bad = RunFolder(shutil.copytree(run.path, run.path.parent / "bad-0123abcd"))
    (bad.path / "result.json").write_text("{")
    code, out, _ = call("--yes")
    assert (code, steps(bad), steps(run)) == (0, ["2", "4", "6", "8"], ["8"])
    assert "single/bad-0123abcd is left alone: " in out


def test_nobody_is_asked_without_a_terminal(run, call):
    code, _, err = call()
    assert (code, err.count("\n"), steps(run)) == (2, 1, ["2", "4", "6", "8"])
    assert err.startswith("error: --yes=false: standard input is not a terminal")
    code, out, _ = call("--dry-run")
    assert (code, steps(run)) == (0, ["2", "4", "6", "8"])
    assert out.count("/checkpoints/step-0000000") == 3


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("Yes\n", 1), ("\n", 4), ("n\n", 4), ("", 4)])
def test_the_user_is_asked(run, call, monkeypatch, answer, left):
    keyboard = SimpleNamespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr(status.sys, "stdin", keyboard)
    code, out, _ = call()
    assert (code, len(steps(run))) == (0, left)
    assert "? [y/N] " in out


def test_one_run_or_one_sweep(run, call, tmp_path):
    other = RunFolder(shutil.copytree(run.path, tmp_path / "runs" / "again" / "other-0123abcd"))
    call(run.path, "--yes")
    assert (steps(run), len(steps(other))) == (["8"], 4)
    call("again", "--yes")
    assert steps(other) == ["8"]


def test_superseded_runs_lose_their_bulk_and_keep_their_records(run, call):
    aside = run.path.parent / "superseded" / f"{run.path.name}.1"
    shutil.copytree(run.path, aside)
    (aside / "traces" / "rank-0.json").write_text("trace")
    records = {name: (aside / name).read_bytes() for name in ("result.json", "metrics.jsonl", "config.yaml")}
    call("--yes", "--what", "superseded")
    assert not (aside / "checkpoints").exists()
    assert not (aside / "traces").exists()
    assert {name: (aside / name).read_bytes() for name in records} == records
    assert (aside / "logs" / "rank-0.log").exists()
    assert len(steps(run)) == 4


def test_snapshots_of_code_go_once_no_run_needs_them(call, tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    made = Made(tmp_path / "runs")
    one = made.run("one")
    begin(one)
    end(one, "crash", ended=time.time() + 9)
    env = json.loads((one.path / "env.json").read_text())
    env["code"] = {"fingerprint": "f1", "git": {"sha": "a" * 40, "patch_complete": True}}
    (one.path / "env.json").write_text(json.dumps(env))
    for name, fingerprint in {"abc": "f1", "old": "f0"}.items():
        folder = made.folder.code / name
        folder.mkdir(parents=True)
        (folder / "code.json").write_text(json.dumps({"fingerprint": fingerprint}))
        aged(folder)
    young = made.folder.code / "young"
    shutil.copytree(made.folder.code / "old", young)
    os.utime(young / "code.json")
    submitted = made.submit(one, launcher="local")
    write_json(one.path / "attempts" / "1" / "job.json", {"token": submitted.token, "index": 0})
    env["code"]["git"]["patch_complete"] = False
    (one.path / "env.json").write_text(json.dumps(env))
    call("--yes")
    # Nothing else has the code of the run.
    assert sorted(path.name for path in made.folder.code.iterdir()) == ["abc", "young"]
    env["code"]["git"]["patch_complete"] = True
    (one.path / "env.json").write_text(json.dumps(env))
    (one.path / "result.json").unlink()
    end(one, "walltime", ended=time.time() + 9)
    call("--yes")
    assert (made.folder.code / "abc").exists()
    end(one, "crash", ended=time.time() + 9)
    call("--yes")
    assert sorted(path.name for path in made.folder.code.iterdir()) == ["young"]


def test_what_cannot_be_removed_is_named(run, call, monkeypatch):
    def refuse(path, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    code, _, err = call("--yes")
    assert (code, err.count("is left alone: Permission denied")) == (1, 3)


def test_remote_checkpoints_are_named_and_left_alone(run, call):
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("  folder: null", "  folder: memory://bucket/x"))
    code, out, err = call("--yes")
    assert (code, err) == (0, "")
    assert "has its checkpoints in memory://bucket/x" in out or "is left alone: " in out
    assert len(steps(run)) == 4


def test_ctrl_c_says_what_is_removed_and_the_same_command_removes_the_rest(run, call, monkeypatch):
    remove, removed = status.remove_item, []

    def interrupted(item):
        if removed:
            raise KeyboardInterrupt
        removed.append(item.path.name)
        remove(item)

    monkeypatch.setattr(status, "remove_item", interrupted)
    code, out, err = call("--yes")
    assert (code, len(steps(run))) == (130, 3)
    assert err == "error: interrupted; what is left can be removed by the same command\n"
    assert out.splitlines()[-1].startswith("removed 1 item, ")
    monkeypatch.setattr(status, "remove_item", remove)
    assert call("--yes", "--what", "checkpoints")[0] == 0
    assert steps(run) == ["8"]


def test_an_empty_folder_of_runs(call, tmp_path):
    line = call("--yes", "--what", "checkpoints")[1].splitlines()[0]
    assert line == f"there is nothing to remove: there is no folder {tmp_path / 'runs'}"
    (tmp_path / "runs").mkdir()
    assert call("--yes")[1].splitlines()[0] == "there is nothing to remove"

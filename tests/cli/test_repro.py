"""`titanlab repro`: code, config and environment come back; what cannot come back is named; nothing is executed."""

import json
import os
import shutil

import pytest

from tests import tiny
from tests.reproduction.repositories import git, make_repository
from titanlab.recipe import Loader, from_mapping, read_flags, to_mapping
from titanlab.records import code_fingerprint, collect, git_state, read_config

PATCH = """\
diff --git a/titanlab/code.py b/titanlab/code.py
--- a/titanlab/code.py
+++ b/titanlab/code.py
@@ -1 +1 @@
-value = 1
+value = 2
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with a package, and a hook that must not run."""
    return make_repository(tmp_path)


@pytest.fixture
def made(tmp_path, repository):
    """A run of that code, as it is now: `made(text="value = 2")` changes the code first."""

    def made(text=None, **changes):
        if text is not None:
            (repository / "titanlab" / "code.py").write_text(text)
        run = tiny.begin(tiny.recipe(tmp_path / "runs"))
        state = git_state(repository / "titanlab")
        code = {"version": "0.1", "fingerprint": code_fingerprint(repository / "titanlab"), "git": None}
        code["git"] = {"sha": state.sha, "branch": state.branch, "dirty": state.dirty}
        code["git"] |= {"patch": "code.patch" if state.patch else None, "patch_complete": state.patch_complete}
        record = collect(devices={"accelerator": "cpu", "name": "cpu", "count": 2}, launcher="local", arguments=[])
        env = {**record.record, "code": code, **changes}
        for folder in (run.path, run.attempt_folder(1)):
            (folder / "env.json").write_text(json.dumps(env))
        (run.attempt_folder(1) / "code.patch").write_text(state.patch)
        git(repository, "checkout", "-q", ".")
        (tmp_path / "ran").unlink(missing_ok=True)
        return run

    return made


@pytest.fixture
def call(say, repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A hook of another repository sets this.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    return lambda run, *words: say("repro", run.path, "--repo", repository, "--into", tmp_path / "out", *words)


def snapshot(run, repository, text):
    """The sweep's copy of code with this text."""
    folder = run.path.parent / "code" / "abc"
    (folder / "titanlab").mkdir(parents=True)
    (folder / "titanlab" / "code.py").write_text(text)
    (folder / "code.json").write_text(json.dumps({"fingerprint": code_fingerprint(folder / "titanlab")}))
    return folder


@pytest.mark.parametrize("text", [None, 'value = "é"\n'])
def test_the_code_comes_back_from_its_commit_and_difference(made, call, tmp_path, text):
    run = made(text)
    code, out, err = call(run)
    assert (code, err) == (0, "")
    assert "its Python files are those of the run" in out
    assert (tmp_path / "out" / "titanlab" / "code.py").read_text() == (text or "value = 1\n")
    assert not (tmp_path / "ran").exists()
    assert out.splitlines()[-2:] == [
        "next: cd out",
        "      python -m titanlab train --config-dir repro --config-name run",
    ]


def test_the_config_composes_to_the_recipe_of_the_run(made, call, tmp_path):
    run = made()
    call(run)
    words = ["--config-dir", str(tmp_path / "out" / "repro"), "--config-name", "run"]
    composed = to_mapping(Loader(read_flags(words), []).recipe())
    expected = to_mapping(from_mapping(run.config()))
    assert {**composed, "runs": ""} == {**expected, "runs": ""}


def test_a_difference_that_is_not_whole_is_taken_from_the_snapshot(made, call, tmp_path, repository):
    run = made("value = 2\n")
    for path in (run.path / "env.json", run.attempt_folder(1) / "env.json"):
        env = json.loads(path.read_text())
        env["code"]["git"]["patch_complete"] = False
        path.write_text(json.dumps(env))
    (run.attempt_folder(1) / "code.patch").write_text("")
    code, out, err = call(run)
    assert (code, "are NOT those of the run" in out) == (1, True)
    assert err == "warning: the code was changed by more than code.patch holds\n"
    git(repository, "worktree", "remove", "--force", str(tmp_path / "out"))
    kept = snapshot(run, repository, "value = 2\n")
    (kept / "link.py").symlink_to("/etc/passwd")
    os.mkfifo(kept / "pipe.py")
    code, out, err = call(run)
    assert (code, "its Python files are those of the run" in out) == (0, True)
    assert f"from the snapshot {kept}" in out
    assert sorted(os.listdir(tmp_path / "out")) == ["repro", "titanlab"] or "code.json" in os.listdir(tmp_path / "out")
    assert not os.path.lexists(tmp_path / "out" / "link.py")


@pytest.mark.parametrize(
    ("git_values", "reason"),
    [
        ({"sha": "0" * 40}, "commit 000000000000 is not in "),
        ({"sha": "--upload-pack=touch ran"}, "there is no commit to go back to"),
        (None, "there is no commit to go back to"),
    ],
)
def test_code_that_is_nowhere_is_one_line(made, call, tmp_path, git_values, reason):
    run = made()
    for path in (run.path / "env.json", run.attempt_folder(1) / "env.json"):
        env = json.loads(path.read_text())
        env["code"]["git"] = git_values if git_values is None else {**env["code"]["git"], **git_values}
        path.write_text(json.dumps(env))
    code, out, err = call(run)
    assert (code, out, err.count("\n")) == (2, "", 1)
    # The run is named, and not the folder that was to be made.
    assert err.startswith(f"error: run={run.path.name}: its code cannot be restored: ")
    assert reason in err
    assert "and no snapshot is kept" in err
    assert not (tmp_path / "out").exists()


def test_a_patch_that_leaves_the_repository_is_refused(made, call, tmp_path):
    """tests/reproduction has other ways out of it."""
    run = made("value = 2\n")
    (run.attempt_folder(1) / "code.patch").write_text(PATCH.replace("a/titanlab/code.py", "../../evil.py"))
    code, out, err = call(run)
    assert (code, "are NOT those of the run" in out) == (1, True)
    assert err.startswith("warning: code.patch is not applied: it ")
    assert (tmp_path / "out" / "titanlab" / "code.py").read_text() == "value = 1\n"
    assert not (tmp_path / "ran").exists()


def test_a_patch_of_which_a_part_does_not_fit_is_named_and_left_out_whole(made, call, tmp_path):
    run = made("value = 2\n")
    (run.attempt_folder(1) / "code.patch").write_text(PATCH + PATCH.replace("code.py", "other.py"))
    code, _, err = call(run)
    assert (code, (tmp_path / "out" / "titanlab" / "code.py").read_text()) == (1, "value = 1\n")
    assert err.startswith("warning: code.patch does not fit the commit (")


def test_what_differs_from_now_is_listed(made, call):
    run = made()
    env = json.loads((run.path / "env.json").read_text())
    env["packages"] |= {"torch": "2.11.0+cu128", "--evil": "1", "numpy": "1; rm -rf /"}
    env["python"]["version"] = "3.12.1\x1b[2J"
    env["command"] = ["titanlab", "train", "model=debug", "seed=3"]
    for path in (run.path / "env.json", run.attempt_folder(1) / "env.json"):
        path.write_text(json.dumps(env))
    code, out, err = call(run, "--dry-run")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "python.version" in out
    assert "packages as they were: pip install torch==2.11.0+cu128\n" in out
    assert "config, where its recipe composes to something else now:" in out
    assert "\n  seed " in out
    assert "next: " not in out


def test_a_folder_that_is_there_is_refused_and_in_the_way_of_no_dry_run(made, call, tmp_path):
    run = made()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    code, _, err = call(run)
    assert (code, (tmp_path / "out" / "mine").read_text()) == (2, "x")
    assert "exists already; give a new folder" in err
    code, out, err = call(run, "--dry-run")
    assert (code, err) == (0, "")
    assert "config: " in out


def test_a_run_without_a_record_is_refused(made, call):
    run = made()
    shutil.rmtree(run.path / "attempts")
    (run.path / "env.json").write_text("[]")
    code, _, err = call(run)
    assert (code, "has recorded no code" in err) == (2, True)
    assert run.chosen_attempt(None) == 0
    assert read_config(run.path / "config.yaml")["seed"] == 0

"""A run's code in a folder: from its commit, with its difference, or from the snapshot; nothing of it is executed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.reproduction.repositories import git, make_repository
from titanlab.errors import ConfigError
from titanlab.records import code_fingerprint
from titanlab.sweep import RecordedCode, repository_of, restore

NONE = RecordedCode(
    env={}, sha=None, branch=None, fingerprint=None, version="1.2", patch="", problem=None, snapshot=None
)
PATCH = """\
diff --git a/titanlab/code.py b/titanlab/code.py
--- a/titanlab/code.py
+++ b/titanlab/code.py
@@ -1 +1 @@
-value = 1
+value = "é"
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with one commit, and a hook that must not run."""
    return make_repository(tmp_path_factory.mktemp("git"))


@pytest.fixture
def recorded(repository):
    """The code of the commit, as a run has recorded it."""
    return replace(
        NONE, sha=git(repository, "rev-parse", "HEAD"), fingerprint=code_fingerprint(repository / "titanlab")
    )


@pytest.fixture
def snapshot(tmp_path):
    folder = tmp_path / "snapshot"
    (folder / "titanlab").mkdir(parents=True)
    (folder / "titanlab" / "code.py").write_text("value = 1\n")
    return folder


def code(folder):
    return (folder / "titanlab" / "code.py").read_text(encoding="utf-8")


def test_a_commit_comes_back_in_a_worktree_and_no_hook_runs(repository, recorded, tmp_path, monkeypatch):
    # A hook of another repository sets these.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    restored = restore(recorded, repository, tmp_path / "into", run="a-1")
    assert (restored.source, restored.is_same, restored.notes) == (f"commit {recorded.sha[:12]}", True, ())
    assert code(tmp_path / "into") == "value = 1\n"
    assert not (repository.parent / "ran").exists()
    assert git(repository, "status", "--porcelain") == ""


def test_the_difference_is_applied(repository, recorded, tmp_path):
    restored = restore(replace(recorded, patch=PATCH), repository, tmp_path / "into", run="a-1")
    assert restored.source.endswith(" with code.patch")
    assert code(tmp_path / "into") == 'value = "é"\n'
    # The fingerprint of the unchanged code is another.
    assert restored.is_same is False


def test_with_such_a_problem_a_snapshot_is_better_than_the_commit(repository, recorded, snapshot, tmp_path):
    given = replace(recorded, problem="it was not kept", snapshot=snapshot)
    restored = restore(given, repository, tmp_path / "into", run="a-1")
    assert (restored.source, restored.is_same) == (f"the snapshot {snapshot}", True)
    assert restored.notes == ("it was not kept",)


def test_of_a_snapshot_only_plain_files_of_code_are_copied(snapshot, tmp_path):
    """The folder may be a stranger's: links lead elsewhere, and to open a pipe waits for a writer."""
    (tmp_path / "secret.txt").write_text("secret")
    (snapshot / "titanlab" / "secret.txt").symlink_to(tmp_path / "secret.txt")
    (snapshot / "titanlab" / "folder").symlink_to(tmp_path)
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "config.txt").write_text("x")
    (snapshot / "run.sh").write_text("x")
    (snapshot / "conf.yaml").write_text("a: 1")
    (snapshot / "titanlab" / "odd.py").mkdir()
    os.mkfifo(snapshot / "titanlab" / "pipe.py")
    given = replace(NONE, fingerprint=code_fingerprint(snapshot / "titanlab"), snapshot=snapshot)
    restored = restore(given, None, tmp_path / "into", run="a-1")
    files = [path.relative_to(tmp_path / "into") for path in (tmp_path / "into").rglob("*") if not path.is_dir()]
    assert sorted(map(str, files)) == ["conf.yaml", "titanlab/code.py"]
    assert restored.is_same is True


@pytest.mark.parametrize(
    ("change", "in_repository", "reason"),
    [
        ({}, True, "the code was installed without git, so there is no commit to go back to"),
        ({"sha": "a" * 40}, False, "commit aaaaaaaaaaaa cannot be looked up: there is no git repository here"),
        ({"sha": "a" * 40, "problem": "no patch"}, True, "fetch it, or give --repo FOLDER; no patch"),
    ],
)
def test_code_that_is_nowhere_is_one_line(repository, tmp_path, change, in_repository, reason):
    with pytest.raises(ConfigError) as caught:
        restore(replace(NONE, **change), repository if in_repository else None, tmp_path / "repro-x", run="a-1")
    said = str(caught.value)
    assert said.startswith("run=a-1: its code cannot be restored: ")
    assert reason in said
    assert said.endswith(
        "; and no snapshot is kept; install titanlab 1.2 by hand, or find the repository that has the commit"
    )
    assert not (tmp_path / "repro-x").exists()


def test_a_folder_that_git_does_not_take_is_one_line(repository, recorded, tmp_path):
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "file").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        restore(recorded, repository, tmp_path / "into", run="a-1")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--into={tmp_path}/into: git worktree add says: ")
    assert (tmp_path / "into" / "file").read_text() == "mine"


def test_the_repository_of_a_folder(repository, tmp_path):
    assert repository_of(repository / "titanlab") == repository
    assert repository_of(tmp_path) is None
    assert repository_of(tmp_path / "missing") is None

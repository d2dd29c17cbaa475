"""The code's commit, and the difference that makes it this code."""

import shutil
import subprocess

import pytest

from titanlab.records import git_state, provenance


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def package(tmp_path, monkeypatch):
    # Neither a person's settings nor a hook that runs the tests.
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    root = tmp_path / "project"
    (root / "pack").mkdir(parents=True)
    (root / "pack" / "a.py").write_text("one = 1\n")
    (root / ".gitignore").write_text("ignored.py\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root / "pack"


def test_a_clean_tree(package):
    state = git_state(package)
    assert state.sha == git(package, "rev-parse", "HEAD").strip()
    assert (state.branch, state.dirty, state.untracked, state.patch, state.patch_complete) == (
        "main",
        False,
        (),
        "",
        True,
    )


def test_the_patch_makes_the_commit_this_code(package, tmp_path):
    (package / "a.py").write_text("one = 2\n")
    (package / "b.py").write_text("two = 2\r\nno end é")
    (package / "empty.py").write_text("")
    (package / "ignored.py").write_text("three = 3\n")
    (package / "data.bin").write_bytes(b"\0\1")
    git(package, "add", str(package / "a.py"))
    state = git_state(package)
    assert (state.dirty, state.patch_complete) == (True, True)
    assert state.untracked == ("pack/b.py", "pack/empty.py")

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(package.parent), str(clone))
    (tmp_path / "code.patch").write_bytes(state.patch.encode())
    git(clone, "apply", str(tmp_path / "code.patch"))
    for name in ("a.py", "b.py", "empty.py"):
        assert (clone / "pack" / name).read_bytes() == (package / name).read_bytes()
    assert git(package, "status", "--porcelain").splitlines()[0] == "M  pack/a.py"  # The person's index is untouched.


def test_a_large_difference_is_cut_and_said_to_be(package, monkeypatch):
    monkeypatch.setattr(provenance, "PATCH_LIMIT", 2000)
    (package / "a.py").write_text("line\n" * 1000)
    state = git_state(package)
    assert len(state.patch) <= 2000
    assert state.patch.endswith("\n")
    assert not state.patch_complete


def test_an_untracked_file_that_is_no_text_is_named_and_not_in_the_patch(package):
    (package / "odd.py").write_bytes(b"\xff\xfe")
    state = git_state(package)
    assert state.untracked == ("pack/odd.py",)
    assert not state.patch_complete


def test_a_detached_commit_and_a_repository_without_one(package, tmp_path):
    git(package, "checkout", "-q", "--detach")
    assert git_state(package).branch is None
    fresh = tmp_path / "fresh"
    (fresh / "pack").mkdir(parents=True)
    git(fresh, "init", "-q", "-b", "main")
    state = git_state(fresh / "pack")
    assert (state.sha, state.branch, state.dirty, state.patch_complete) == (None, "main", False, True)


def test_a_package_installed_inside_another_project_is_not_that_projects_code(package):
    inside = package.parent / ".venv" / "site-packages" / "pack"
    inside.mkdir(parents=True)
    assert git_state(inside) is None


def test_without_git_there_is_no_state(package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(package) is None


def test_a_checkout_of_another_owner_has_its_commit_too(package, tmp_path, monkeypatch):
    """git calls such a repository dubious. A program in front of it makes git believe that it is one."""
    sha = git(package, "rev-parse", "HEAD").strip()
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nGIT_TEST_ASSUME_DIFFERENT_OWNER=1 exec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    refused = subprocess.run(["git", "-C", package, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert "dubious ownership" in refused.stderr
    (package / "a.py").write_text("one = 2\n")
    state = git_state(package)
    assert (state.sha, state.branch, state.dirty, state.patch_complete) == (sha, "main", True, True)
    assert "+one = 2" in state.patch

"""A run's code and environment: what is recorded, what differs now, and how it comes back; nothing of it is executed."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.reproduction.repositories import git, make_repository
from titanlab.records import PATCH_LIMIT, RECORD, RunFolder, code_fingerprint
from titanlab.sweep import RecordedCode, pip_line, recorded_code, restore
from titanlab.sweep.repro import wrong_path

SHA, PRINT = "a1" * 20, "b2" * 32

PATCH = """diff --git a/titanlab/x.py b/titanlab/x.py
index 123..456 100644
--- a/titanlab/x.py
+++ b/titanlab/x.py
@@ -1 +1 @@
-a
+b
"""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "sweep" / "a-0123abcd"
    (path / "attempts" / "1").mkdir(parents=True)
    return RunFolder(path)


def record(run, *, git=None, patch=None, **code):
    """What the attempt 1 has recorded."""
    content = {"code": {"version": "1.0", "fingerprint": PRINT, "git": git, **code}}
    (run.attempt_folder(1) / "env.json").write_text(json.dumps(content))
    if patch is not None:
        (run.attempt_folder(1) / "code.patch").write_bytes(patch.encode())


@pytest.mark.parametrize(
    ("git", "patch", "kept", "problem"),
    [
        ({"patch": False}, PATCH, False, "the code was changed, and the difference was not kept"),
        ({"patch": True}, None, False, "the code was changed, and code.patch cannot be read ("),
        ({"patch": True}, "--- a/../x\n", False, "code.patch is not applied: it names 'a/../x'"),
        ({"patch": True, "patch_complete": False}, PATCH, True, "the code was changed by more than code.patch holds"),
        (
            {"patch": True, "patch_complete": True},
            PATCH + "+key = [hidden]\n",
            True,
            "what looked like a secret was taken out of code.patch",
        ),
        ({"patch": True}, "x" * (4 * PATCH_LIMIT + 1), False, "the code was changed, and code.patch cannot be read ("),
    ],
)
def test_a_patch_that_is_not_whole_says_why(run, git, patch, kept, problem):
    record(run, git={"sha": SHA, "dirty": True, **git}, patch=patch)
    code = recorded_code(run, 1)
    assert code.patch == (patch if kept else "")
    assert code.problem.startswith(problem)


def test_the_snapshot_of_the_same_code_is_found(run):
    record(run)
    folder = run.path.parent / "code"
    for name, found in ((".hidden", PRINT), ("other", "c3" * 32), ("same", PRINT), ("text", None)):
        (folder / name).mkdir(parents=True)
        if found:
            (folder / name / RECORD).write_text(json.dumps({"fingerprint": found}))
    assert recorded_code(run, 1).snapshot == folder / "same"
    (folder / "same").rename(folder.parent / "elsewhere")
    (folder / "same").symlink_to(folder.parent / "elsewhere")
    assert recorded_code(run, 1).snapshot is None


@pytest.mark.parametrize(
    "patch",
    [
        "",
        PATCH,
        "--- /dev/null\n+++ b/new.py\n",
        "new file mode 100644\nindex 0000000..1234567 100755\n",
        "+++ b/a..b/c...py\n",
        "+../x is text of the patch\n+ --- /etc/passwd\n",
    ],
)
def test_plain_files_below_the_root_are_taken(patch):
    assert wrong_path(patch) is None


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("--- a/../x\n", "it names 'a/../x'"),
        ("+++ /etc/passwd\n", "it names '/etc/passwd', which is not a path below the repository"),
        ("copy from a/b/..\n", "it names 'a/b/..'"),
        ('diff --git "a/../x" "b/x"\n', "it names 'a/../x'"),
        ("+++ b/.GIT/config\n", "it names 'b/.GIT/config'"),
        ("+++ b/.git/hooks/post-checkout\n", "it names 'b/.git/hooks/post-checkout'"),
        ("rename to ../x\n", "it names '../x'"),
        ("+++ b/.gitattributes\n", "it names 'b/.gitattributes'"),
        ("Binary files a/../x and b/x differ\n", "it names 'a/../x'"),
        ("new file mode 120000\n", "it makes a link or a submodule"),
        ("new mode 160000\n", "it makes a link or a submodule"),
        ("index 1234567..89abcde 120000\n", "it makes a link or a submodule"),
    ],
)
def test_other_files_are_refused(patch, said):
    assert wrong_path(PATCH + patch) == said


def of(**sections):
    return {"packages": {"torch": "2.11.0", "numpy": "2.0"}, "python": {"version": "3.11.7"}, **sections}


def test_the_command_installs_what_differs():
    then = of(packages={"torch": "2.11.0+cu128", "numpy": "2.0", "a-b_c.d": "1!2.0.post1"})
    now = of(packages={"numpy": "2.0", "torch": "2.12.0"})
    assert pip_line(then, now) == "pip install a-b_c.d==1!2.0.post1 torch==2.11.0+cu128"


@pytest.mark.parametrize(
    ("name", "version"),
    [("--index-url", "1"), ("", "1"), ("a", "1; rm -r"), ("a", "$(x)"), ("a", None), ("a", "1\n"), ("a" * 101, "1")],
)
def test_what_a_shell_or_pip_could_take_for_more_is_left_out(name, version):
    assert pip_line({"packages": {name: version}}, {}) is None


NONE = RecordedCode(
    env={}, sha=None, branch=None, fingerprint=None, version="1.2", patch="", problem=None, snapshot=None
)


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

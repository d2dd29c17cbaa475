"""What a run has recorded about its code, of which nothing is taken that would be more than a value."""

from __future__ import annotations

import json

import pytest

from titanlab.errors import ConfigError
from titanlab.records import PATCH_LIMIT, RECORD, RunFolder
from titanlab.sweep import recorded_code
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


def test_clean_code_has_a_commit_and_no_patch(run):
    record(run, git={"sha": SHA, "branch": "main", "dirty": False}, patch="not looked at")
    code = recorded_code(run, 1)
    assert (code.sha, code.branch, code.fingerprint, code.version) == (SHA, "main", PRINT, "1.0")
    assert (code.patch, code.problem, code.snapshot) == ("", None, None)
    assert code.env["code"]["version"] == "1.0"


@pytest.mark.parametrize("patch", [PATCH, PATCH.replace("\n", "\r\n")])
def test_changed_code_has_its_patch_byte_for_byte(run, patch):
    record(run, git={"sha": SHA, "dirty": True, "patch": True, "patch_complete": True}, patch=patch)
    code = recorded_code(run, 1)
    assert (code.patch, code.problem) == (patch, None)


@pytest.mark.parametrize(
    ("git", "patch", "kept", "problem"),
    [
        ({"patch": False}, PATCH, False, "the code was changed, and the difference was not kept"),
        ({"patch": True}, None, False, "the code was changed, and code.patch cannot be read ("),
        ({"patch": True}, "--- a/../x\n", False, "code.patch is not applied: it names 'a/../x'"),
        ({"patch": True}, PATCH, True, "the code was changed by more than code.patch holds"),
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


@pytest.mark.parametrize("sha", ["--upload-pack=x", SHA[:-1], SHA + "\n", 5, None, [SHA]])
def test_what_is_no_commit_is_not_taken(run, sha):
    record(run, git={"sha": sha, "branch": 5}, fingerprint=sha)
    code = recorded_code(run, 1)
    assert (code.sha, code.branch, code.fingerprint) == (None, None, None)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"code": 5}'])
def test_a_run_without_a_record_is_refused(run, content):
    if content is not None:
        (run.attempt_folder(1) / "env.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"has recorded no code: it has no env\.json, or a damaged one; name a run that"
    ):
        recorded_code(run, 1)


def test_without_attempts_the_run_s_own_record_is_read(run):
    (run.path / "env.json").write_text(json.dumps({"code": {"version": "x" * 100}}))
    assert recorded_code(run, 0).version == "x" * 40


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
        ("+++ /etc/passwd\n", "it names '/etc/passwd', which is no path below the repository"),
        ("copy from a/b/..\n", "it names 'a/b/..'"),
        ('diff --git "a/../x" "b/x"\n', "it names 'a/../x'"),
        ("+++ b/.GIT/config\n", "it names 'b/.GIT/config'"),
        ("+++ b/.gitattributes\n", "it names 'b/.gitattributes'"),
        ("Binary files a/../x and b/x differ\n", "it names 'a/../x'"),
        ("new file mode 120000\n", "it makes a link or a submodule"),
        ("new mode 160000\n", "it makes a link or a submodule"),
        ("index 1234567..89abcde 120000\n", "it makes a link or a submodule"),
    ],
)
def test_other_files_are_refused(patch, said):
    assert wrong_path(PATCH + patch) == said

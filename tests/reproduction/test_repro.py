"""A run's code and environment: what is recorded, what differs now, and how it comes back; nothing of it is executed."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.reproduction.repositories import git, make_repository
from titanlab.errors import ConfigError
from titanlab.records import PATCH_LIMIT, RECORD, RunFolder, code_fingerprint
from titanlab.sweep import (
    RecordedCode,
    config_differences,
    differences,
    pip_line,
    recorded_code,
    repository_of,
    restore,
)
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


def of(**sections):
    return {"packages": {"torch": "2.11.0", "numpy": "2.0"}, "python": {"version": "3.11.7"}, **sections}


def test_equal_environments_do_not_differ():
    assert differences(of(), of()) == []
    assert differences({}, {}) == []
    assert pip_line(of(), of()) is None


def test_what_was_recorded_is_compared_and_what_is_new_is_not():
    then = of(host={"name": "a", "cpu": "x", "other": 1}, platform={"system": "Linux"})
    now = of(host={"name": "b", "cpu": "x", "memory_gib": 5}, devices={"count": 8})
    assert differences(then, now) == [("platform.system", "Linux", "-"), ("host.name", "a", "b")]


def test_packages_and_variables_differ_in_both_directions():
    then = of(environment={"A": "1", "SLURM_JOB_ID": "5", "LOCAL_RANK": "0", "RANK": "1", "MASTER_PORT": "7"})
    now = of(packages={"torch": "2.12.0", "wheel": "1"}, environment={"B": "2"})
    assert differences(then, now) == [
        ("numpy", "2.0", "-"),
        ("torch", "2.11.0", "2.12.0"),
        ("wheel", "-", "1"),
        ("A", "1", "-"),
        ("B", "-", "2"),
    ]


@pytest.mark.parametrize("section", [None, 5, "x", []])
def test_a_damaged_section_is_empty(section):
    broken = dict.fromkeys(("packages", "python", "environment", "host"), section)
    assert differences(broken, broken) == []
    assert pip_line(broken, of()) is None


def test_texts_are_one_short_line():
    long = "x" * 100
    found = differences({"environment": {"n" * 100: f"a\n  b\t{long}"}}, {})
    assert found == [("n" * 60, f"a b {long}"[:59] + "…", "-")]


def test_the_command_installs_what_differs():
    then = of(packages={"torch": "2.11.0+cu128", "numpy": "2.0", "a-b_c.d": "1!2.0.post1"})
    now = of(packages={"numpy": "2.0", "torch": "2.12.0"})
    assert pip_line(then, now) == "pip install a-b_c.d==1!2.0.post1 torch==2.11.0+cu128"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("--index-url", "1"),
        ("", "1"),
        ("a", "1; rm -r"),
        ("a", "$(x)"),
        ("a", None),
        ("a", "1\n"),
        ("a" * 101, "1"),
    ],
)
def test_what_a_shell_or_pip_could_take_for_more_is_left_out(name, version):
    assert pip_line({"packages": {name: version}}, {}) is None


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", "2", "3")]),
        ({"a": None}, {"b": False}, [("a", "null", "–"), ("b", "–", "false")]),
        # An empty mapping is a value; a number and its text are written alike.
        ({"a": {}, "c": 1}, {"a": {"b": 1}, "c": "1"}, [("a", "{}", "–"), ("a.b", "–", "1")]),
        # The place of a run does not count.
        (
            {"runs": "a", "name": "n", "data": {"name": "x"}},
            {"runs": "b", "data": {"name": "y"}},
            [("data.name", "x", "y")],
        ),
    ],
)
def test_values_of_configs_that_differ_are_named_by_their_keys(then, now, expected):
    assert config_differences(then, now) == expected


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


def test_without_a_repository_a_commit_cannot_be_looked_up(recorded, tmp_path):
    with pytest.raises(ConfigError, match="there is no git repository here .*; no patch; and no snapshot is kept"):
        restore(replace(recorded, problem="no patch"), None, tmp_path / "into", run="a-1")


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

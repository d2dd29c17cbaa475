"""env.json: what is recorded of code and machine, and above all what is not."""

import json
import shutil
import subprocess

import pytest

from titanlab.records import code_fingerprint, collect, git_state, provenance, redact, redacted_arguments, versions
from titanlab.records.provenance import variables

# Made up here, in the forms of the real ones.
HF, WANDB, AWS, GITHUB = "hf_" + "Ab3" * 11, "0123456789" * 4, "AKIA" + "Z7" * 8, "ghp_" + "x9" * 18


def test_the_record_is_json_with_everything():
    found = collect(devices={"name": "cpu", "count": 2}, launcher="local", arguments=["titanlab", "train"], environ={})
    record = json.loads(json.dumps(found.record, allow_nan=False))
    assert record["schema"] == 1
    assert record["command"] == ["titanlab", "train"]
    assert record["launcher"] == "local"
    assert record["devices"] == {"name": "cpu", "count": 2}
    assert record["packages"]["torch"] == versions(["torch"])["torch"]
    assert len(record["code"]["fingerprint"]) == 64
    assert record["python"]["version"].startswith("3.")
    assert record["host"]["cores"] >= record["host"]["usable_cores"] >= 1
    assert record["host"]["memory_gib"] > 0
    assert record["host"]["cpu"]
    assert record["platform"]["system"]
    assert record["environment"] == {}
    assert versions(["titanlab-no-such-package"]) == {}


def test_variables_that_matter_are_kept():
    wanted = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "7",
        "TORCH_LOGS": "recompiles",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert variables(wanted) == wanted


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY HOME PATH USER SSH_AUTH_SOCK OPENAI_API_KEY SLURM_JWT PGPASSWORD "
    "NCCL_SECRET TORCH_HUB_TOKEN TRITON_API_KEY UCX_PASSWORD MKL_ACCESS_KEY MY_NCCL_DEBUG "
    "GLOO_KEY NCCL_PASS TORCH_AUTH OMP_PIN TRITON_LOGIN FI_COOKIE PYTORCH_SESSION TORCHINDUCTOR_REDIS_URL".split(),
)
def test_other_variables_never(name):
    assert variables({name: "value"}) == {}


@pytest.mark.parametrize("secret", [HF, AWS, GITHUB])
@pytest.mark.parametrize("around", ["{}", "NCCL_X={}", "--x={}", "a {} b", "'{}'", "{{x: {}}}"])
def test_secrets_that_show_themselves_are_taken_out_everywhere(secret, around):
    text = around.format(secret)
    assert secret not in redact(text)
    assert secret not in " ".join(redacted_arguments([text]))
    assert secret not in json.dumps(variables({"NCCL_DEBUG": text}))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--token", "hunter2"],
        ["--hf-token", "hunter2"],
        ["--token=hunter2"],
        ["--api-key", "hunter2"],
        ["tracker.api_key=hunter2"],
        ["+data={password: hunter2}"],
        ["WANDB_API_KEY=hunter2"],
        ["https://me:hunter2@example.org/x"],
        ["https://hunter2@example.org/x"],
        ["my_secret=hunter2"],
    ],
)
def test_secrets_on_the_command_line_are_taken_out(arguments):
    shown = redacted_arguments(["titanlab", *arguments, "training.steps=5"])
    assert "hunter2" not in " ".join(shown)
    assert (shown[0], shown[-1]) == ("titanlab", "training.steps=5")


@pytest.mark.parametrize(
    "argument",
    [
        "data.tokenizer=path/to/tokenizer.json",
        "data.tokens=shards",
        "n_tokens_seen=5",
        "model.dim=256",
        "run=0123456789abcdef0123456789abcdef01234567",
        "https://example.org/a@b",
        "--max-tokens",
    ],
)
def test_what_is_no_secret_stays(argument):
    assert redacted_arguments([argument, "100"]) == [argument, "100"]


def test_a_patch_keeps_its_code_and_loses_its_secrets(monkeypatch):
    code = "+    token = _next(model, tokens, key=api_key_of(user))\n+    tokens: int = 5\n+secret = decode(text)\n"
    assert redact(code) == code
    assert HF not in redact(f"+HF = '{HF}'\n")
    assert WANDB not in redact(f"+wandb.login(key='{WANDB}')\n")
    assert "s3cr3tvalue0123456789" not in redact("+  api_key: s3cr3tvalue0123456789\n")
    state = provenance.GitState(
        sha="1" * 40, branch="main", dirty=True, untracked=(), patch=f"+x = '{HF}'\n", patch_complete=True
    )
    monkeypatch.setattr(provenance, "git_state", lambda package: state)
    found = collect(devices={}, launcher="local", environ={})
    assert found.patch == "+x = '[hidden]'\n"
    assert found.record["code"]["git"]["patch"] == "code.patch"


def test_code_is_the_same_until_a_python_file_differs(tmp_path):
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("b = 1")
    first = code_fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert code_fingerprint(tmp_path) == first
    (tmp_path / "sub" / "b.py").write_text("b = 2")
    changed = code_fingerprint(tmp_path)
    (tmp_path / "sub" / "b.py").write_text("b = 1")
    assert changed != first == code_fingerprint(tmp_path)
    (tmp_path / "sub" / "b.py").rename(tmp_path / "b.py")
    assert code_fingerprint(tmp_path) != first


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
    (package.parent / "-c.py").write_text("four = 4\n")
    git(package, "add", str(package / "a.py"))
    # A setting of many people.
    git(package, "config", "diff.noprefix", "true")
    state = git_state(package)
    assert (state.dirty, state.patch_complete) == (True, True)
    assert state.untracked == ("-c.py", "pack/b.py", "pack/empty.py")

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(package.parent), str(clone))
    (tmp_path / "code.patch").write_bytes(state.patch.encode())
    git(clone, "apply", str(tmp_path / "code.patch"))
    for name in ("a.py", "b.py", "empty.py", "../-c.py"):
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

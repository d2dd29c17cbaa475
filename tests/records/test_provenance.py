"""env.json: what is recorded, and above all what is not."""

import json
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from titanlab.records import code_fingerprint, collect, provenance, redact, redacted_arguments, versions
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


def test_it_takes_no_time_that_a_person_would_notice():
    collect(devices={}, launcher="local")
    start = time.perf_counter()
    collect(devices={}, launcher="local")
    assert time.perf_counter() - start < 2


def test_packages_that_are_not_installed_are_left_out():
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


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), st.text(max_size=5)))
def test_no_variable_whose_name_speaks_of_a_secret(environ):
    for name in variables({**environ, **{f"NCCL_{name}": "" for name in environ}}):
        assert not any(word in name.split("_") for word in ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL"))


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


def test_a_patch_keeps_its_code_and_loses_its_secrets():
    code = "+    token = _next(model, tokens, key=api_key_of(user))\n+    tokens: int = 5\n+secret = decode(text)\n"
    assert redact(code) == code
    assert HF not in redact(f"+HF = '{HF}'\n")
    assert WANDB not in redact(f"+wandb.login(key='{WANDB}')\n")
    assert "s3cr3tvalue0123456789" not in redact("+  api_key: s3cr3tvalue0123456789\n")


def test_the_patch_is_redacted(monkeypatch):
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

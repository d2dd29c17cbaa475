"""Importing from the hub, which is a folder here."""

import json
import shutil
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.cli.compose import compose
from titanlab.train import fetch_model


def failed(kind, status):
    return kind("no", response=httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x")))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for the two functions that fetch; what they were asked for is kept."""
    asked = []

    def install(folder=None, error=None, late=None):
        def one(*, repo_id, filename, revision, token):
            asked.append((repo_id, filename, revision, token))
            if error is not None:
                raise error
            if not (folder / filename).is_file():
                raise failed(errors.RemoteEntryNotFoundError, 404)
            return str(folder / filename)

        def many(*, repo_id, revision, token, allow_patterns):
            asked.append((repo_id, tuple(allow_patterns), revision, token))
            if late is not None:
                raise late
            cache = tmp_path / "cache"
            cache.mkdir()
            for path in folder.rglob("*"):
                name = path.relative_to(folder)
                if path.is_file() and any(Path(name).match(p) and "/" not in str(name) for p in allow_patterns):
                    # As in the hub's cache: links to files that nobody may write.
                    (tmp_path / "blobs").mkdir(exist_ok=True)
                    blob = Path(shutil.copyfile(path, tmp_path / "blobs" / path.name))
                    blob.chmod(0o444)
                    (cache / name).symlink_to(blob)
            return str(cache)

        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("titanlab.system.hub.silence", lambda: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", many)
        return asked

    monkeypatch.chdir(tmp_path)
    return install


def test_a_model_of_the_hub_is_imported(hub, tmp_path, capsys):
    folder = made.folder(tmp_path / "there", made.LLAMA_3_2, files=2)
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (folder / "tokenizer.json").write_text("{}")
    asked = hub(folder)
    assert main(["import", "owner/Llama-3.2 Tiny".replace(" ", "-"), "--revision", "v1", "--token", "secret"]) == 0
    said = capsys.readouterr().out
    assert "secret" not in said
    assert {(repo, revision, token) for repo, _, revision, token in asked} == {("owner/Llama-3.2-Tiny", "v1", "secret")}
    one = Path("weights/llama_3_2_tiny")
    assert (one / "tokenizer" / "tokenizer.json").stat().st_mode & 0o200
    assert sorted(path.name for path in one.iterdir()) == [
        "conf", "generation_config.json", "tokenizer", "weights.json", "weights.safetensors",
    ]  # fmt: skip
    # The command that it prints is one: word for word.
    line = said.splitlines()[-1].split()
    assert line[:2] == ["titanlab", "train"]
    (recipe,) = compose([*line[2:], "data=stdlib"])
    assert (recipe.init_from, recipe.model.layers, recipe.model.tied_embeddings) == (str(one), 3, True)
    assert recipe.model.rope_factor == 32.0
    assert recipe.data.tokenizer == str(tmp_path / one / "tokenizer")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failed(errors.GatedRepoError, 403), "does not let you in: it is gated or private"),
        (failed(errors.RepositoryNotFoundError, 404), "is no model of the hub, or a private one"),
        (failed(errors.RevisionNotFoundError, 404), "has no such revision"),
        (failed(errors.RemoteEntryNotFoundError, 404), "has no config.json, so it holds no model of transformers"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be fetched (offline); check the network"),
        (httpx.ConnectError("no route\nto host"), "cannot be fetched (no route to host)"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_hub_that_gives_nothing(hub, tmp_path, capsys, error, message, late):
    if late and "no config.json" in message:
        # Its config.json was there: a mirror of the hub lacks another file.
        message = "cannot be fetched (no); check the network, or copy the files by hand"
    folder = made.folder(tmp_path / "there")
    hub(folder, **{"late" if late else "error": error})
    assert main(["import", "owner/model"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: source=owner/model: {message}")
    assert said.count("\n") == 1
    assert not Path("weights").exists()


def test_an_error_of_the_report_is_not_one_of_the_hub(hub, tmp_path):
    hub(made.folder(tmp_path / "there"))

    def report(line):
        raise ValueError(line)

    with pytest.raises(ValueError, match="fetching owner/model"):
        fetch_model("owner/model", revision=None, token=None, key="source", report=report)


def test_another_model_is_refused_before_it_is_fetched(hub, tmp_path, capsys):
    folder = made.folder(tmp_path / "there", {**made.SMALL, "architectures": ["GPT2LMHeadModel"]})
    asked = hub(folder)
    assert main(["import", "owner/model"]) == 2
    assert "GPT2LMHeadModel: is no architecture that is computed here" in capsys.readouterr().err
    assert [what for _, what, *_ in asked] == ["config.json"]


def test_names_of_options_do_not_hide_our_own(hub, tmp_path, capsys):
    folder = made.folder(tmp_path / "llama3_8b")
    assert main(["import", str(folder)]) == 0
    assert Path("weights/llama3_8b_imported/conf/model/llama3_8b_imported.yaml").is_file()

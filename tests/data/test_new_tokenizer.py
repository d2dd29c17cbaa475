"""Fetching a tokenizer, from a hub that is a folder here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from titanlab.data import download_tokenizer
from titanlab.data.tokenizers import load
from titanlab.errors import ConfigError


def failed(kind: type[Exception], status: int) -> Exception:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))
    return kind("no", response=response)  # type: ignore[call-arg]


class Hub:
    """Stands in for `hf_hub_download`: files of a folder, or an error."""

    def __init__(self, folder: Path | None = None, error: Exception | None = None) -> None:
        self.folder, self.error = folder, error
        self.asked: list[tuple[str, str, str | None]] = []

    def __call__(self, *, repo_id: str, filename: str, local_dir: str, token: str | None) -> str:
        self.asked.append((repo_id, filename, token))
        if self.error is not None:
            raise self.error
        assert self.folder is not None
        if not (self.folder / filename).is_file():
            raise failed(errors.RemoteEntryNotFoundError, 404)
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)
        return str(shutil.copyfile(self.folder / filename, Path(local_dir, filename)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**how: Any) -> Hub:
        made = Hub(**how)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("titanlab.system.hub.silence", lambda: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", made)
        return made

    return install


def test_fetches_what_the_model_has(hub: Any, json_file: Path, tmp_path: Path) -> None:
    fake, lines = hub(folder=json_file.parent), []
    found = download_tokenizer("owner/model", tmp_path / "a" / "b", "secret", report=lines.append)
    assert found == tmp_path / "a" / "b" / "tokenizer.json"
    assert sorted(each.name for each in found.parent.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (load(found).bos_id, load(found.parent).eos_id) == (0, 1)
    assert {(repo, token) for repo, _, token in fake.asked} == {("owner/model", "secret")}
    assert any(f"{load(found).vocab_size} tokens" in line for line in lines)
    assert not any("secret" in line for line in lines)


def test_prefers_the_file_it_can_read(hub: Any, json_file: Path, tmp_path: Path) -> None:
    shutil.copytree(json_file.parent, tmp_path / "hub")
    (tmp_path / "hub" / "tokenizer.model").write_bytes(b"dGhl 0\nYQ== 1\n")
    hub(folder=tmp_path / "hub")
    assert download_tokenizer("owner/model", tmp_path / "out").name == "tokenizer.json"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failed(errors.GatedRepoError, 403), "does not let you in: .*; accept its terms .*--token or HF_TOKEN"),
        (failed(errors.HfHubHTTPError, 401), "does not let you in"),
        (failed(errors.RepositoryNotFoundError, 404), "is no model of the hub, or a private one; check its name"),
        (errors.HFValidationError("bad name"), "is no model of the hub"),
        (errors.LocalEntryNotFoundError("offline"), r"cannot be fetched \(offline\); check the network"),
        (httpx.ConnectError("no route\nto host"), r"cannot be fetched \(no route to host\); check the network"),
        (failed(errors.HfHubHTTPError, 500), "cannot be fetched"),
    ],
)
def test_a_hub_that_gives_nothing(hub: Any, tmp_path: Path, error: Exception, message: str) -> None:
    hub(error=error)
    with pytest.raises(ConfigError, match=f"^repo=owner/model: {message}") as caught:
        download_tokenizer("owner/model", tmp_path / "out", "secret")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    hub(folder=tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        download_tokenizer("owner/model", tmp_path / "out")


def test_a_file_that_is_no_tokenizer_replaces_nothing(hub: Any, tmp_path: Path, model_file: Path) -> None:
    shutil.copytree(model_file.parent, tmp_path / "out")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "tokenizer.model").write_bytes(b"dGhl 0\nYQ== 1\n")
    hub(folder=tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"tokenizer\.model: is in tiktoken's format"):
        download_tokenizer("owner/model", tmp_path / "out")
    assert load(tmp_path / "out").fingerprint == load(model_file).fingerprint


@pytest.mark.parametrize("repo", ["", "/", "a/b/c", "https://hub.invalid/a/b"])
def test_names_that_are_none(hub: Any, tmp_path: Path, repo: str) -> None:
    fake = hub()
    with pytest.raises(ConfigError, match="is no model of the hub; give <owner>/<model>"):
        download_tokenizer(repo, tmp_path)
    assert not fake.asked


def test_a_folder_that_cannot_be_written(hub: Any, tmp_path: Path, model_file: Path) -> None:
    hub(folder=model_file.parent)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="^--folder=.*: cannot be written"):
        download_tokenizer("owner/model", tmp_path / "file" / "below")

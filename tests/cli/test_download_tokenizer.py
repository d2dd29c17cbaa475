"""`titanlab download-tokenizer`: where the tokenizer goes, and the override that it prints."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titanlab.cli import main, tokens


@pytest.mark.parametrize(
    ("flags", "folder"), [([], "tokenizers/Llama-3.1-8B"), (["--folder=~/my [é]"], "home/my [é]/Llama-3.1-8B")]
)
def test_the_override_names_the_file(tmp_path, monkeypatch, capsys, flags, folder):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(repo, into, token, *, report):
        asked.append((repo, into.absolute(), token))
        report("fetched tokenizer.json")
        return into / "tokenizer.json"

    monkeypatch.setattr(tokens, "download_tokenizer", download)
    assert main(["download-tokenizer", "meta-llama/Llama-3.1-8B", *flags, "--token", "hf_x"]) == 0
    assert asked == [("meta-llama/Llama-3.1-8B", tmp_path / folder, "hf_x")]
    told, line = capsys.readouterr().out.splitlines()
    assert told == "fetched tokenizer.json"
    (override,) = shlex.split(line)
    parsed = OverridesParser.create().parse_override(override)
    assert parsed.key_or_group == "data.tokenizer"
    assert (tmp_path / str(parsed.value())) == tmp_path / folder / "tokenizer.json"

"""`titanlab tokenize` and `download-tokenizer`: the commands and overrides that they print name what was made."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titanlab.cli import main, tokens
from titanlab.cli.compose import compose

TEXT = "the def return self class import value tokens of a stream and its order in every rank one two\n" * 300


def test_the_printed_command_trains_on_what_was_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    # A bracket and a space in the names; the ~ that bash leaves in a pattern in quotes.
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts" / "a [1].txt").write_text(TEXT)
    arguments = ["tokenize", "my texts/*.txt", "~/to kens [é] %", "--vocab-size", "330", "--validation-fraction", "0"]
    assert main(arguments) == 0
    folder = tmp_path / "to kens [é] %"
    assert (folder / "index.json").is_file()
    assert not (tmp_path / "~").exists()
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["titanlab", "train"]
    (recipe,) = compose(command[2:])
    assert (recipe.data.folder, recipe.model.vocab_size) == (str(folder), 330)


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

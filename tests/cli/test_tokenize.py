"""`titanlab tokenize`: the command that it prints trains on what it wrote."""

from __future__ import annotations

import shlex

from titanlab.cli import main
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

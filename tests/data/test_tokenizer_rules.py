"""A tokenizer whose regular expression never ends on a short trial is refused."""

import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import tokenizers

from titanlab.cli import main
from titanlab.data import tokenizers as reading
from titanlab.data.tokenizers import PATTERN, load
from titanlab.errors import ConfigError

ENDLESS = r"(a+)+b"
# Read twice over, from every place: the time grows with the cube of a run's length, and no limit of the library's acts.
SLOW = r"\w*\w*[^\w\s]{40}"
TEXT = "a" * 60 + "!"


@pytest.fixture
def made(tmp_path):
    """`made(pattern)`: a byte-level tokenizer that splits so; its file."""

    def make(pattern):
        alphabet = {each: number for number, each in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
        model.decoder = tokenizers.decoders.ByteLevel()
        model.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"

    return make


def test_a_pattern_that_never_ends_is_named(made, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    start = time.monotonic()
    file = made(ENDLESS)
    arguments = ["tokenize", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", str(file)]
    assert main(arguments) == 2
    assert time.monotonic() - start < 60
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --tokenizer={file}: its regular expression (a+)+b backtracks ")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "tokenizer.json"]


def test_files_of_the_current_folder_with_names_of_modules_are_not_imported(made, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path[1:]])
    tokenizer = load(made(r"(?:\w|x)+"))
    assert tokenizer.encode("ab ab")


@pytest.mark.parametrize("pattern", [PATTERN, r"\p{N}{1,3}"])
def test_known_patterns_need_no_trial(made, pattern, monkeypatch):
    monkeypatch.setattr(reading, "TRIAL_SECONDS", "no number")
    load(made(pattern))


def test_a_process_that_crashes_is_told(made, monkeypatch):
    monkeypatch.setattr(reading, "module_command", lambda module: ["sh", "-c", "kill -SEGV $$"])
    with pytest.raises(ConfigError, match="a process that tries it ends with exit code -11, perhaps for lack of memor"):
        load(made(r"\w+|\W"))


def test_a_process_that_hangs_is_ended(made, monkeypatch):
    monkeypatch.setattr(reading, "SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"backtracks for more than 0 s in a trial"):
        load(made(r"\w+|\W"))


def replaced(pattern):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "}


def split_by(pattern):
    return lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": pattern})


def decoded_by(pattern):
    return lambda content: content.update(
        decoder={"type": "Sequence", "decoders": [content["decoder"], replaced(pattern)]}
    )


def added_through(pattern):
    """The library gives a token that is to be normalised to the normaliser while it reads the file."""

    def change(content):
        content["normalizer"] = replaced(pattern)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False, "normalized": True}
        content["added_tokens"].append({"id": 256, "content": "a" * 60 + "!", **flags})

    return change


@pytest.fixture
def changed(made):
    """`changed(change)`: that tokenizer, its description changed; its file."""

    def make(change):
        file = made(PATTERN)
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return file

    return make


@pytest.mark.parametrize(
    ("part", "pattern"),
    [(added_through, ENDLESS), (decoded_by, ENDLESS), (split_by, SLOW)],
)
def test_a_pattern_of_any_part_is_found_when_it_is_read(changed, part, pattern, monkeypatch, capfd):
    monkeypatch.setattr(reading, "TRIAL_SECONDS", 0.3)
    file = changed(part(pattern))
    with pytest.raises(ConfigError, match=r"backtracks (without end|for more than 0.3 s of computing) ") as refused:
        load(file)
    assert str(refused.value).startswith(f"data.tokenizer={file}: its regular expression {pattern} backtracks ")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pattern", [r"\w+|\W", PATTERN], ids=["tried", "known"])
def test_a_text_that_it_cannot_encode_is_told(changed, pattern):
    def change(content):
        content["pre_tokenizer"]["pretokenizers"] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        ]
        content["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "[UNK]"}

    tokenizer = load(changed(change))
    for call in (lambda: tokenizer.encode("zebra"), lambda: tokenizer.encode_many(["zebra"])):
        with pytest.raises(ConfigError, match=r"cannot encode the text \(.*Missing \[UNK\]"):
            call()
    assert tokenizer.encode("b") == [1]


def test_a_trial_reads_long_runs_of_the_characters_of_the_expressions():
    texts = []
    tokenizer = SimpleNamespace(vocab_size=1, encode=lambda text: texts.append(text) or [], decode=lambda ids: "")
    reading.probe(tokenizer, ["(ß|q)+$"])
    assert all(character * reading._RUN in texts[0] for character in "ßq(a0 ")

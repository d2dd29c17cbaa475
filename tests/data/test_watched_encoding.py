"""A tokenizer whose regular expression never ends is ended; others give what they give without being watched."""

import json
import os
import time

import pytest
import tokenizers

from titanlab.cli import main
from titanlab.data import watched_encoding
from titanlab.data.tiktoken_file import PATTERN
from titanlab.data.tokenizer import HuggingFaceTokenizer, load
from titanlab.data.watched_encoding import unknown_patterns
from titanlab.errors import ConfigError

ENDLESS = r"(a+)+b"
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


def test_a_pattern_that_never_ends_is_named(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watched_encoding, "SECONDS", 2.0)
    (tmp_path / "a.txt").write_text(TEXT)
    start = time.monotonic()
    file = made(ENDLESS)
    arguments = ["tokenize", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", str(file)]
    assert main(arguments) == 2
    assert time.monotonic() - start < 60
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --tokenizer={file}: its regular expression (a+)+b backtracks ")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "tokenizer.json"]


def test_a_call_that_takes_too_long_is_ended(made, monkeypatch):
    monkeypatch.setattr(watched_encoding, "SECONDS", 0.0)
    tokenizer = load(made(r"\w+|\W"))
    # Its start alone takes longer than no time.
    with pytest.raises(ConfigError, match=r"backtracks for more than 0 s in 1 characters"):
        tokenizer.encode("a")
    monkeypatch.setattr(watched_encoding, "SECONDS", 60.0)
    assert len(tokenizer.encode("a")) == 1


def test_what_is_watched_gives_the_same(made):
    file = made(r"\w+|\W")
    tokenizer = load(file)
    plain = HuggingFaceTokenizer(file, file.read_bytes(), "key", watched=False)
    assert tokenizer._watched is not None
    texts = ["", "one two\n", "naïve 中文 🎉", "x" * 100_000]
    assert tokenizer.encode_many(texts) == plain.encode_many(texts) == [tokenizer.encode(each) for each in texts]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts
    process = tokenizer._watched._process
    del tokenizer
    assert process.poll() is not None


def test_a_process_that_dies_is_told(made):
    tokenizer = load(made(r"\w+|\W"))
    tokenizer.encode("a")
    tokenizer._watched._process.kill()
    tokenizer._watched._process.wait()
    with pytest.raises(ConfigError, match="the process that encodes with it has ended"):
        tokenizer.encode("a")
    # The next call has a new one.
    assert tokenizer.encode("a") == load(made(PATTERN)).encode("a")


@pytest.mark.parametrize("pattern", [PATTERN, r"\p{N}{1,3}"])
def test_known_patterns_are_not_watched(made, pattern):
    assert load(made(pattern))._watched is None


def test_every_place_of_a_pattern_is_looked_into():
    description = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "n+"}}]},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "p+"}},
        "decoder": {"decoders": [{"type": "Replace", "pattern": {"Regex": "d+"}}, {"pattern": {"String": "s+"}}]},
        "model": {"vocab": {"Regex": 1}},
    }
    assert unknown_patterns(json.loads(json.dumps(description))) == ["d+", "n+", "p+"]

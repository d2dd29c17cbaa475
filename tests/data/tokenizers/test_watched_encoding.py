"""A tokenizer whose regular expression never ends is ended; others give what they give without being watched."""

import itertools
import json
import os
import select
import subprocess
import sys
import time

import pytest
import tokenizers

from titanlab.cli import main
from titanlab.data.tokenizers import watched_encoding
from titanlab.data.tokenizers.tiktoken_file import PATTERN
from titanlab.data.tokenizers.tokenizer import HuggingFaceTokenizer, load
from titanlab.data.tokenizers.watched_encoding import unknown_patterns
from titanlab.errors import ConfigError

ENDLESS = r"(a+)+b"
# Read twice over, from every place: the time grows with the cube of a run's length, and no limit of the library's acts.
SLOW = r"\w*\w*[^\w\s]{40}"
# The same where only a text that spells it out shows it.
HIDDEN = r"(?:qz)*(?:qz)*[^\w\s]{40}"
HIDDEN_TEXT = "qz" * 50_000
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


def test_a_call_that_takes_too_long_is_ended(made, monkeypatch):
    tokenizer = load(made(r"\w+|\W"))
    monkeypatch.setattr(watched_encoding, "SECONDS", -1.0)
    with pytest.raises(ConfigError, match=r"backtracks for more than -1 s in 1 characters"):
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


def test_files_of_the_current_folder_with_names_of_modules_are_not_imported(made, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path[1:]])
    tokenizer = load(made(r"(?:\w|x)+"))
    assert tokenizer.encode("ab ab")


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


def replaced(pattern):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "}


def normalised_by(pattern):
    return lambda content: content.update(normalizer=replaced(pattern))


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
    [(added_through, ENDLESS), *itertools.product([normalised_by, split_by, decoded_by], [ENDLESS, SLOW])],
)
def test_a_pattern_of_any_part_is_found_when_it_is_read(changed, part, pattern, monkeypatch, capfd):
    monkeypatch.setattr(watched_encoding, "TRIAL_SECONDS", 0.3)
    file = changed(part(pattern))
    with pytest.raises(ConfigError, match=r"backtracks (without end|for more than 0.3 s of computing) ") as refused:
        load(file)
    assert str(refused.value).startswith(f"data.tokenizer={file}: its regular expression {pattern} backtracks ")
    assert capfd.readouterr().err == ""


def test_a_pattern_that_is_slow_on_some_text_only(made, monkeypatch):
    tokenizer = load(made(HIDDEN))
    before = tokenizer.encode("a text as others")
    with monkeypatch.context() as patched:
        patched.setattr(watched_encoding, "SECONDS", 0.2)
        patched.setattr(watched_encoding, "UNITS_PER_SECOND", 10**9)
        with pytest.raises(ConfigError, match=r"\(\?:qz\).* backtracks for more than 0 s in 100000 characters"):
            tokenizer.encode(HIDDEN_TEXT)
    # The next text is another matter.
    assert tokenizer.encode("a text as others") == before
    assert tokenizer.decode(before) == "a text as others"


@pytest.mark.parametrize("pattern", [r"\w+|\W", PATTERN], ids=["watched", "not watched"])
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


# Prints the number of the process that encodes, when that has a question that takes minutes, or none.
HOLDER = """
import json, sys
from pathlib import Path
from titanlab.data.tokenizers.tokenizer import load
tokenizer = load(Path(sys.argv[1]))
process = tokenizer._watched._process
if sys.argv[2] == "busy":
    # So few seconds that, with those of grace, one is left.
    process.stdin.write(json.dumps(["encode", ["qz" * 200_000], -4.0]).encode() + b"\\n")
    process.stdin.flush()
print(process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no numbers to wait for")
@pytest.mark.parametrize("state", ["busy", "idle"])
def test_nothing_is_left_of_a_parent_that_is_killed(made, state):
    command = [sys.executable, "-c", HOLDER, str(made(HIDDEN)), state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        ended, _, _ = select.select([handle], [], [], 60)
        os.close(handle)
    assert ended


def test_a_call_that_is_interrupted_leaves_no_answer_behind(made, monkeypatch):
    tokenizer = load(made(r"\w+|\W"))
    with monkeypatch.context() as patched:

        def interrupted(*arguments):
            raise KeyboardInterrupt

        # Ctrl-C between the question and its answer.
        patched.setattr(watched_encoding.select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("one text")
    assert tokenizer.decode(tokenizer.encode("another")) == "another"

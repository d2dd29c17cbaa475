"""Small corpora, tokenizers and folders of tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from titanlab.data.new_tokenizer import train_sentencepiece

WORDS = "the def return self class import value tokens of a stream and its order in every rank one two".split()


def silent(line):
    """A report to nobody, of single lines."""
    assert "\n" not in line


def text(number, words=40):
    """A document that no other number gives."""
    rng = np.random.default_rng(number)
    lines = [" ".join(rng.choice(WORDS, size=5)) for _ in range(words // 5)]
    return f"document {number}\n" + "\n".join(lines) + "\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TITANLAB_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A SentencePiece model of 400 pieces."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece((text(number) for number in range(200)), vocab_size=400, file=file)
    return file


@pytest.fixture(scope="session")
def json_file(tmp_path_factory):
    """A byte-level BPE as tokenizer.json, with special tokens, and its tokenizer_config.json."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(
        (text(number) for number in range(50)),
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|begin|>", "<|end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder = tmp_path_factory.mktemp("hf-tokenizer")
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def json_lines(tmp_path_factory):
    """Five JSONL files of 12 documents, of different lengths."""
    folder = tmp_path_factory.mktemp("jsonl")
    for file in range(5):
        rows = [{"text": text(100 * file + row, 5 + 7 * row)} for row in range(12)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder

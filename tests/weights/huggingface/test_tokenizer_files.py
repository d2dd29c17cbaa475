"""Tokenizers go through an import and an export, and transformers reads what comes out: its config, and Llama 3's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.data.tokenizers import load
from titanlab.train.interchange import copy_tokenizer, write_tokenizer_config


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of three words."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


WRITTEN = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 64,
    "bos_token": "<s>",
    "add_bos_token": True,
    "eos_token": "</s>",
}


def written(folder):
    write_tokenizer_config(folder, bos_id=0, eos_id=1, context=64)
    return json.loads((folder / "tokenizer_config.json").read_text())


def test_special_tokens_and_the_context_are_written(folder):
    assert written(folder) == WRITTEN


def test_entries_of_an_existing_file_are_kept(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a", "chat_template": "x"}')
    assert written(folder) == {**WRITTEN, "eos_token": "a", "chat_template": "x"}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"null", b"\xff", b"[" * 100_000], ids=lambda content: content[:4])
def test_a_damaged_file_is_written_anew(folder, content):
    """Reading a tokenizer ignores it, too."""
    (folder / "tokenizer_config.json").write_bytes(content)
    assert written(folder) == WRITTEN


TOKENS = [*(bytes([byte]) for byte in range(256)), *(b" t", b"th", b" th", b"the", b" the", b"12", b"123", b"\n\n")]


def write(folder):
    """Write a tokenizer as Meta's folders have it."""
    (folder / "original").mkdir()
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS))
    (folder / "original" / "tokenizer.model").write_bytes(b"".join(lines))


def test_an_original_tokenizer_is_copied_with_what_lies_beside_it(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    write(tmp_path)
    assert copy_tokenizer(tmp_path, tmp_path / "copied") == ["tokenizer_config.json", "tokenizer.model"]
    assert load(tmp_path / "copied").vocab_size == len(TOKENS) + 256
    # It is for those who have no other.
    (tmp_path / "tokenizer.json").write_text("{}")
    assert copy_tokenizer(tmp_path, tmp_path / "other") == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.full
def test_an_original_tokenizer_is_imported_and_exported(tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    folder = made.folder(tmp_path / "there", {**made.LLAMA_3_1, "vocab_size": len(TOKENS) + 256})
    write(folder)
    assert main(["import", str(folder), "--into", "ours"]) == 0
    assert "data.tokenizer=ours/tokenizer" in capsys.readouterr().out
    assert [path.name for path in Path("ours/tokenizer").iterdir()] == ["tokenizer.model"]
    assert main(["export", "ours", "--into", "theirs"]) == 0
    ours, theirs = load(Path("ours/tokenizer")), AutoTokenizer.from_pretrained("theirs")
    text = "I'll return  def f(x):\n\t naïve 中文 12345 the tokens"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert (theirs.bos_token, theirs.bos_token_id) == ("<|begin_of_text|>", ours.bos_id)
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|end_of_text|>", ours.eos_id)
    # A tokenizer.model is SentencePiece's to everybody else.
    assert not Path("theirs/tokenizer.model").exists()
    # Sampling needs no import.
    assert main(["generate", str(folder), "--prompt", "the", "--tokens", "2"]) == 0

"""The tokenizer's config for transformers: entries of an existing one are kept, a damaged one is written anew."""

import json

import pytest

from titanlab.train.hub_folders import write_tokenizer_config


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

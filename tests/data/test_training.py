"""Training of tokenizers: the same for the same texts, of texts of any kind, and texts that cannot train one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.conftest import text
from titanlab.data.new_tokenizer import train_sentencepiece
from titanlab.data.tokenizers import Tokenizer, load
from titanlab.errors import ConfigError


def test_training_is_repeatable(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_sentencepiece((text(number) for number in range(30)), vocab_size=330, file=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_training_reads_texts_of_any_kind(tmp_path: Path) -> None:
    texts = ["\t\ttabs\n" * 20, "x" * 50_000, "\u2581 \x00 \r\n" * 20, "中文" * 500, *(text(n) for n in range(30))]
    train_sentencepiece(texts, vocab_size=330, file=tmp_path / "any.model")
    tokenizer: Tokenizer = load(tmp_path / "any.model")
    assert all(tokenizer.decode(tokenizer.encode(each)) == each for each in texts)


@pytest.mark.parametrize(
    ("texts", "vocab_size", "key", "message"),
    [
        (["a few words"], 400, "data.vocab_size", r"too small for it: it has \d+ pieces; give more text"),
        ([text(n) for n in range(20)], 5000, "data.vocab_size", r"it has \d+ pieces; try \d+"),
        (["".join(map(chr, range(0x4E00, 0x5200)))], 400, "data.vocab_size", r"it needs \d+; try \d+"),
        ([], 400, "data", "no text to train a tokenizer on"),
    ],
)
def test_texts_that_cannot_train_a_tokenizer(
    tmp_path: Path, texts: list[str], vocab_size: int, key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train_sentencepiece(texts, vocab_size=vocab_size, file=tmp_path / "t.model")
    assert caught.value.key == key
    assert not (tmp_path / "t.model").exists()


def test_an_error_of_the_texts_is_the_callers_error(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield text(1)
        raise ConfigError("data.files", "x", "broke", "mend it")

    with pytest.raises(ConfigError, match=r"^data\.files=x: broke; mend it$"):
        train_sentencepiece(broken(), vocab_size=330, file=tmp_path / "t.model")
    assert not (tmp_path / "t.model").exists()


def test_a_trained_tokenizer_has_the_asked_size_and_special_tokens(tmp_path: Path) -> None:
    train_sentencepiece([text(number) for number in range(30)], vocab_size=340, file=tmp_path / "t.model")
    tokenizer = load(tmp_path / "t.model")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (340, 1, 2)
    # Digits are tokens of their own.
    assert len(tokenizer.encode("1234")) == 4

"""Text that becomes token shards once: where they are, what is checked before and after, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import silent, text
from titanlab.data.contract import Separators
from titanlab.data.schema import Files
from titanlab.data.text import PreparedText, content_of, make_shards, train_tokenizer
from titanlab.errors import ConfigError

FITS = {"seq_len": 8, "vocab_size": 400, "validation_sequences": 0}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(text(number))
    return folder


@pytest.fixture
def made(corpus: Path, model_file: Path, cache: Path) -> Any:
    """`made(…)`: the reader of files, before anything is prepared."""

    def make(**changes: Any) -> PreparedText[Any]:
        given = {"files": str(corpus), "tokenizer": str(model_file), "validation_fraction": 0.1, **changes}
        reader = Files(**given).implementation()
        assert isinstance(reader, PreparedText)
        return reader

    return make


def refusal(action: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*given, **more)
    return str(caught.value)


def test_the_folder_is_named_by_kind_and_fingerprint(made: Any, cache: Path) -> None:
    reader = made()
    assert reader.folder == cache / "tokens" / f"files-{reader.fingerprint()}"
    assert not reader.folder.exists()
    before = reader.fingerprint()
    reader.prepare(report=silent)
    assert (reader.folder.is_dir(), made().fingerprint()) == (True, before)


def test_before_it_is_prepared_there_is_no_index(made: Any) -> None:
    reader = made()
    for ask in (reader.vocab_size, reader.separators, lambda: reader.index):
        assert refusal(ask) == f"data=files: {reader.folder} is missing; prepare the data first"
    # A tokenizer that is named needs no corpus.
    assert reader.tokenizer().vocab_size == 400


def test_what_is_prepared_is_read(made: Any) -> None:
    reader = made()
    reader.prepare(report=silent)
    assert reader.vocab_size() == 400
    assert reader.separators() == Separators(begin=1, end=2)
    assert reader.index.tokens("train") > reader.index.tokens("validation") > 0
    batch = reader.open_train(seed=0, seq_len=8, global_batch=2, rank=0, ranks=1, state=None).next_batch()
    assert batch.tokens.shape == (2, 8)
    assert len(reader.open_validation(seq_len=8, sequences=3, rank=0, ranks=1)) == 3
    # Nothing is done twice.
    made().prepare(report=pytest.fail)


def test_a_trained_tokenizer_is_that_of_the_shards(made: Any) -> None:
    reader = made(tokenizer=None, vocab_size=330)
    reader.prepare(report=silent)
    assert reader.tokenizer().vocab_size == 330
    assert reader.tokenizer().file == reader.folder / "tokenizer.model"


def test_rules_that_need_no_tokens_are_checked_before(made: Any) -> None:
    made().check(**FITS)
    assert "model.vocab_size=399: is smaller than the 400 tokens" in refusal(
        made().check, **{**FITS, "vocab_size": 399}
    )
    untrained = made(tokenizer=None, vocab_size=500)
    assert "model.vocab_size=400: is smaller than the 500 tokens" in refusal(untrained.check, **FITS)
    nothing = made(validation_fraction=0.0)
    nothing.check(**FITS)
    said = refusal(nothing.check, **{**FITS, "validation_sequences": 1})
    assert said.startswith("data.validation_fraction=0.0: holds nothing out to validate on")


def test_a_corpus_without_text_is_said_before_the_vocabulary(made: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    said = refusal(made(files=str(tmp_path / "empty.txt")).check, **{**FITS, "vocab_size": 1})
    assert said.startswith(f"data.files={tmp_path / 'empty.txt'}: ")


def test_rules_that_need_the_tokens_are_checked_after(made: Any) -> None:
    reader = made()
    # Nothing is known of the length yet.
    reader.check(**{**FITS, "seq_len": 10**6, "validation_sequences": 5})
    reader.prepare(report=silent)
    reader.check(**{**FITS, "validation_sequences": 5})
    assert refusal(reader.check, **{**FITS, "seq_len": 10**6}).startswith(
        "training.seq_len=1000000: the corpus is shorter"
    )


def test_a_file_that_cannot_be_read_is_one_line(made: Any, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(files: object) -> str:
        raise PermissionError(13, "Permission denied", "a.txt")

    reader = made()
    assert len(content_of(reader.corpus)) == 32
    monkeypatch.setattr("titanlab.data.cache.hash_of_files", denied)
    said = "data.files=a.txt: cannot be read (Permission denied); check its permissions"
    assert refusal(reader.fingerprint) == refusal(content_of, reader.corpus) == said


def test_a_tokenizer_must_tell_documents_apart(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = made()
    tokenizer = kept.tokenizer()
    named = made(tokenizer=str(tokenizer.file), document_mask=True)
    monkeypatch.setattr(named, "tokenizer", lambda: tokenizer)
    named.check_tokens(10**6)
    tokenizer.bos_id = tokenizer.eos_id = None
    assert "try false, or a tokenizer with such a token" in refusal(named.check_tokens, 10**6)


def test_progress_is_reported(made: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "shards").mkdir()
    new = made(tokenizer=None, vocab_size=330)
    index = make_shards(tmp_path / "shards", new.corpus, new.config, fingerprint="ab", report=lines.append)
    begins = [
        "reading 12 files, 0.0 MB: 12 .txt as text, one document a file",
        "training a tokenizer of 330 pieces",
        "trained it in ",
        "tokenising",
    ]
    begins.append("a document begins with token 1 and ends with token 2")
    begins.append(f"{index.tokens('train'):,} tokens to train on and {index.tokens('validation'):,} held out after ")
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    assert (index.vocab_size, index.fingerprint, index.tokenizer) == (330, "ab", "tokenizer.model")


def test_a_corpus_of_empty_files_makes_no_shards(made: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "shards").mkdir()
    empty = made(files=str(tmp_path / "empty.txt"), tokenizer=None, vocab_size=330)
    how: dict[str, Any] = {"fingerprint": "", "report": pytest.fail}
    said = refusal(make_shards, tmp_path / "shards", empty.corpus, empty.config, **how)
    assert said == f"data.files={tmp_path / 'empty.txt'}: has no text in it; give files with text in them"
    assert list((tmp_path / "shards").iterdir()) == []


def test_training_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    train_tokenizer([text(n) for n in range(9)], vocab_size=330, file=tmp_path / "t.model", report=lines.append)
    assert (lines[0], lines[1][:14], len(lines)) == ("training a tokenizer of 330 pieces", "trained it in ", 2)
    assert (tmp_path / "t.model").is_file()

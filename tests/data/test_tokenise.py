"""`titanlab tokenize`: a folder of token shards that stands alone, complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import silent, text
from tests.data.test_indexed import global_steps
from titanlab.data import source, write_token_shards
from titanlab.data.schema import Files, TokenFolder
from titanlab.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(text(number))
    return folder


def test_tokenised_files_are_the_data_that_files_would_be(corpus: Path, cache: Path, tmp_path: Path) -> None:
    index = write_token_shards(str(corpus), tmp_path / "made", vocab_size=330, validation_fraction=0.1, report=silent)
    tokens = TokenFolder(folder=str(tmp_path / "made"))
    files = Files(files=str(corpus), vocab_size=330, validation_fraction=0.1)
    for config in (tokens, files):
        source.prepare(config, report=silent)
        source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=330, validation_sequences=3)
    assert source.vocab_size(tokens) == index.vocab_size == 330
    assert np.array_equal(global_steps(tokens, ranks=1, steps=5)[0], global_steps(files, ranks=2, steps=5)[0])
    tokenizer = source.tokenizer(tokens)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("def x:\n")) == "def x:\n"
    # Nothing but the folder was made, and nothing in the cache: it stands alone.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "corpus", "made"]


def test_tokenises_with_a_tokenizer_that_is_there(corpus: Path, tmp_path: Path, json_file: Path, cache: Path) -> None:
    write_token_shards(str(corpus), tmp_path / "made", tokenizer=str(json_file), report=silent)
    config = TokenFolder(folder=str(tmp_path / "made"))
    tokenizer = source.tokenizer(config)
    assert tokenizer is not None
    # Its special tokens are named in the file beside it, which has come along.
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    json_file.parent.rename(json_file.parent.with_name("moved"))
    try:
        assert source.tokenizer(config) is not None
    finally:
        json_file.parent.with_name("moved").rename(json_file.parent)


def test_a_folder_that_is_there_is_not_touched(corpus: Path, tmp_path: Path, cache: Path, model_file: Path) -> None:
    target = tmp_path / "deep" / "made"
    write_token_shards(str(corpus), target, tokenizer=str(model_file), report=silent)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(ConfigError, match=r"^folder=.*: is there already; name another"):
        write_token_shards(str(corpus), target, tokenizer=str(model_file), report=silent)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    empty = tmp_path / "empty"
    empty.mkdir()
    write_token_shards(str(corpus), empty, tokenizer=str(model_file), report=silent)
    assert {file.name: file.read_bytes() for file in empty.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": "none/*.txt"}, r"^files=.*none/\*\.txt: matches no file"),
        ({"tokenizer": "none.model"}, r"^--tokenizer=.*none\.model: does not exist; .*, or leave it out to train one$"),
        ({"files": ""}, r"^files=: names no file; give a file, a folder or a glob: corpus/\*\.jsonl$"),
        ({"vocab_size": 10}, r"^--vocab-size=10: must be at least 320"),
        ({"vocab_size": 9999}, r"^--vocab-size=9999: the corpus is too small for it"),
        ({"validation_fraction": 0.9}, r"^--validation-fraction=0.9: must be between 0 and 0.5"),
        ({"files": "bad.jsonl", "text_field": "body"}, r"^--text-field=body: is not in .*its keys are: text"),
        ({"files": "empty.txt"}, r"^files=.*empty\.txt: "),
        ({"folder": Path("file/below")}, r"^folder=.*: cannot be written"),
    ],
)
def test_what_cannot_be_tokenised(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "file").write_text("")
    how = {"files": str(corpus), "folder": Path("made"), "vocab_size": 330, **changes}
    with pytest.raises(ConfigError, match=message):
        write_token_shards(how.pop("files"), how.pop("folder"), report=silent, **how)
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".made*"))


def test_a_file_that_may_not_be_read_is_one_line(
    corpus: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(files: object) -> str:
        raise PermissionError(13, "Permission denied", str(corpus / "03.txt"))

    monkeypatch.setattr("titanlab.data.cache.hash_of_files", denied)
    with pytest.raises(ConfigError) as caught:
        write_token_shards(str(corpus), tmp_path / "made", vocab_size=330, report=silent)
    assert str(caught.value) == f"files={corpus / '03.txt'}: cannot be read (Permission denied); check its permissions"
    assert not (tmp_path / "made").exists()


def test_a_full_disk_leaves_nothing(
    corpus: Path, tmp_path: Path, cache: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titanlab.data.shards.write_index", full)
    with pytest.raises(ConfigError) as caught:
        write_token_shards(str(corpus), tmp_path / "made", tokenizer=str(model_file), report=silent)
    assert str(caught.value) == f"folder={tmp_path / 'made'}: cannot be written (No space left on device); make room"
    assert [each.name for each in tmp_path.iterdir() if each.name != "cache"] == ["corpus"]


def test_another_corpus_or_tokenizer_has_another_fingerprint(
    corpus: Path, tmp_path: Path, cache: Path, model_file: Path, json_file: Path
) -> None:
    def of(name: str, **given: Any) -> str | None:
        given = {"tokenizer": str(model_file), **given}
        return write_token_shards(str(corpus), tmp_path / name, report=silent, **given).fingerprint

    first = of("a")
    assert of("b") == first
    others = [of("c", tokenizer=str(json_file)), of("d", validation_fraction=0.1), of("e", text_field="body")]
    (corpus / "03.txt").write_text("other")
    others.append(of("f"))
    assert len({first, *others}) == 5

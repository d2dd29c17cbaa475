"""data=tokens: folders made by `titanlab tokenize`, by hand, or wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import text
from tests.data.streams.test_indexed import folder_of, global_steps
from titanlab.data import source
from titanlab.data.files_schema import Files
from titanlab.data.tokenise import write_token_shards
from titanlab.data.tokens_schema import TokenFolder
from titanlab.errors import ConfigError


def silent(line: str) -> None:
    assert "\n" not in line


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
        ({"tokenizer": "none.model"}, r"^--tokenizer=.*none\.model: does not exist"),
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


def write_by_hand(folder: Path, **changes: Any) -> TokenFolder:
    """What docs/data.md says about tokens of another tool: raw numbers and an index with four lines."""
    folder.mkdir(exist_ok=True)
    np.arange(100, dtype="<u2").tofile(folder / "train.bin")
    index = {
        "format": "titanlab-tokens",
        "version": 1,
        "dtype": "uint16",
        "vocab_size": 100,
        "train": [{"file": "train.bin", "tokens": 100}],
    }
    index |= changes
    (folder / "index.json").write_text(json.dumps({key: value for key, value in index.items() if value is not ...}))
    return TokenFolder(folder=str(folder))


def test_tokens_of_another_tool(tmp_path: Path, cache: Path) -> None:
    config = write_by_hand(tmp_path / "made")
    source.prepare(config, report=silent)
    source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=100)
    assert source.tokenizer(config) is None
    first = source.fingerprint(config)
    assert first == source.fingerprint(write_by_hand(tmp_path / "again"))
    np.arange(100, dtype="<u2")[::-1].tofile(tmp_path / "made" / "train.bin")
    assert source.fingerprint(config) != first


BAD_INDEX = {
    "format": ({"format": "other"}, "is no index of token shards .*format 'other'"),
    "version": ({"version": 2}, "version 2"),
    "no version": ({"version": ...}, "is no index of token shards"),
    "dtype": ({"dtype": "float32"}, "dtype 'float32', neither uint16 nor uint32"),
    "vocabulary of the dtype": ({"vocab_size": 70000}, "vocab_size 70000 does not fit uint16"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size 0"),
    "vocabulary of the tokens": ({"vocab_size": 50}, "has token 99, and index.json says vocab_size 50"),
    "missing file": ({"train": [{"file": "x.bin", "tokens": 1}]}, r"x\.bin: is missing"),
    "file of another length": ({"train": [{"file": "train.bin", "tokens": 99}]}, "has 200 bytes, not 198"),
    "file elsewhere": ({"train": [{"file": "../train.bin", "tokens": 100}]}, r"'\.\./train\.bin' is not in the folder"),
    "train is no list": ({"train": 5}, "is no index of token shards"),
}


@pytest.mark.parametrize("case", BAD_INDEX)
def test_bad_indexes_are_named(tmp_path: Path, case: str) -> None:
    changes, message = BAD_INDEX[case]
    config = write_by_hand(tmp_path / "made", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        source.prepare(config, report=silent)
    assert caught.value.key == "data.folder"
    assert caught.value.cure


def test_folders_that_are_none(tmp_path: Path) -> None:
    for folder, message in (("none", "is no folder"), ("", "names no folder")):
        with pytest.raises(ConfigError, match=message):
            source.fingerprint(TokenFolder(folder=folder))
    with pytest.raises(ConfigError, match=r"has no index\.json; make the folder with `titanlab tokenize`"):
        source.fingerprint(TokenFolder(folder=str(tmp_path)))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        source.fingerprint(TokenFolder(folder=str(tmp_path)))


def test_rules(tmp_path: Path) -> None:
    config = folder_of(tmp_path / "short", [60, 40])
    fits: dict[str, int] = {"seq_len": 8, "global_batch": 4, "ranks": 2, "vocab_size": 100}
    source.check(config, **fits)
    for change, message in (
        ({"ranks": 3}, r"training\.global_batch=4: must be a multiple of the 3 .*; try 3 or 6"),
        ({"vocab_size": 99}, r"model\.vocab_size=99: is smaller than the 100 tokens.*; try model\.vocab_size=100"),
        ({"seq_len": 60}, r"training\.seq_len=60: the corpus is shorter than one sequence.*; try 59 or less"),
        ({"validation_sequences": 1}, r"data\.folder=.*: holds nothing out to validate on"),
    ):
        with pytest.raises(ConfigError, match=message):
            source.check(config, **{**fits, **change})
    source.check(config, **{**fits, "seq_len": 59})

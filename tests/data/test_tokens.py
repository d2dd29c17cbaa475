"""data=tokens: folders made by `titanlab tokenize`, by hand, or wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import silent
from tests.data.test_indexed import folder_of
from titanlab.data import source
from titanlab.data.schema import TokenFolder
from titanlab.errors import ConfigError


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

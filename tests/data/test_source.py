"""The door of data: light to import, open to kinds of others, and the rules of every kind, each told in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import pytest

from titanlab.data import DataConfig, source
from titanlab.data.contract import DataSource
from titanlab.data.schema import Files, HuggingFace, Stdlib, TokenFolder
from titanlab.errors import ConfigError
from titanlab.options import discover

FITS = {"seq_len": 8, "global_batch": 12, "ranks": 1, "vocab_size": 1 << 20}


def run(program):
    """Output of a Python of its own, in which warnings are errors."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_every_kind_is_discovered():
    assert {"stdlib", "files", "tokens", "hf", "synthetic"} <= set(discover()["data"])


def test_no_module_of_data_imports_torch(model_file, json_lines, tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n" * 400)
    program = f"""
import importlib, os, pkgutil, sys
import titanlab.data
os.environ["TITANLAB_CACHE"] = {str(tmp_path / "cache")!r}
for module in pkgutil.walk_packages(titanlab.data.__path__, "titanlab.data."):
    importlib.import_module(module.name)
from titanlab.data import source
from titanlab.data.schema import Files, HuggingFace, Synthetic
lines = HuggingFace(path="json", data_files=[{str(json_lines / "*.jsonl")!r}], tokenizer={str(model_file)!r}, streams=2,
                    validation_fraction=0.1)
for config in (lines, Files(files={str(tmp_path / "a.txt")!r}, tokenizer={str(model_file)!r}), Synthetic()):
    source.prepare(config, report=lambda line: None)
    source.check(config, seq_len=8, global_batch=2, ranks=1, vocab_size=5000, validation_sequences=1)
    source.open_train(config, seed=0, seq_len=8, global_batch=2, rank=0, ranks=1).next_batch()
    list(source.open_validation(config, seq_len=8, sequences=2, rank=0, ranks=1))
assert "torch" not in sys.modules
"""
    assert run(program) == ""


class LettersSource(DataSource):
    """Another package's kind of data, which notes how it is called; it has no rules of its own."""

    def __init__(self):
        self.called = []

    def _note(self, name, **how):
        self.called.append((name, how))
        return 26

    tokenizer = lambda self: 26  # noqa: E731
    fingerprint = lambda self: "26"  # noqa: E731
    prepare = partialmethod(_note, "prepare")
    open_train = partialmethod(_note, "open_train")
    open_validation = partialmethod(_note, "open_validation")


@dataclass(frozen=True, kw_only=True)
class Letters(DataConfig):
    kind: str = "letters"
    source: Any = field(default_factory=LettersSource)

    def implementation(self):
        return self.source


def test_kinds_of_others_need_no_change_here():
    config = Letters()
    assert source.fingerprint(config) == "26"
    source.check(config, **FITS)
    source.prepare(config, report=print)
    assert source.tokenizer(config) == 26
    how = {"seq_len": 4, "rank": 0, "ranks": 2}
    with pytest.raises(ConfigError, match=r"^training\.global_batch=3: must be a multiple of the 2"):
        source.open_train(config, seed=1, global_batch=3, **how)
    source.open_train(config, seed=1, global_batch=2, **how)
    source.open_validation(config, sequences=3, **how)
    assert config.source.called == [
        ("prepare", {"report": print}),
        ("open_train", {**how, "seed": 1, "global_batch": 2, "state": None}),
        ("open_validation", {**how, "sequences": 3}),
    ]


BAD_VALUES = {
    "stdlib vocabulary": (Stdlib, {"vocab_size": 100}, r"^data\.vocab_size=100: must be at least 320.*; try 2048"),
    "stdlib fraction": (Stdlib, {"validation_fraction": 0.6}, r"^data\.validation_fraction=0\.6: must be between"),
    "stdlib negative": (Stdlib, {"validation_fraction": -0.1}, r"^data\.validation_fraction=-0\.1: must be between"),
    "files blank": (Files, {"files": "  "}, r"^data\.files=.*: names no file"),
    "files field": (Files, {"files": "a", "text_field": ""}, r"^data\.text_field=: names no field"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values(case):
    schema, values, message = BAD_VALUES[case]
    with pytest.raises(ConfigError, match=message):
        schema(**values)


def test_paths_hold_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Files(files="a/*.txt:~/b").files == f"{tmp_path}/a/*.txt:/home/somebody/b"
    assert TokenFolder(folder="tokens").folder == f"{tmp_path}/tokens"
    assert Stdlib(tokenizer="t.model").tokenizer == f"{tmp_path}/t.model"
    assert HuggingFace(path="json", data_files=["a", "hf://b"]).data_files == (f"{tmp_path}/a", "hf://b")
    assert HuggingFace(path="allenai/c4").path == "allenai/c4"
    (tmp_path / "here").mkdir()
    assert HuggingFace(path="here").path == f"{tmp_path}/here"


RULES = {
    "batch": (Stdlib, {}, {"ranks": 5}, r"^training\.global_batch=12: must be a multiple of the 5 .*; try 10 or 15"),
    "vocabulary": (Stdlib, {}, {"vocab_size": 2047}, r"^model\.vocab_size=2047: is smaller than the 2048 tokens"),
    "hf files": (HuggingFace, {"path": "json", "data_files": ["/no/x"]}, {}, r"^data\.data_files=/no/x: matches no"),
    "hf held out": (
        HuggingFace,
        {"path": "a/b", "validation_fraction": 0.0},
        {"validation_sequences": 8},
        r"^data\.validation_fraction=0\.0: holds nothing out",
    ),
    "hf nothing kept": (
        HuggingFace,
        {"path": "a/b", "validation_documents": 0},
        {"validation_sequences": 8},
        r"^data\.validation_documents=0: holds nothing out",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_rules_hold_before_anything_is_prepared(case, cache):
    schema, values, change, message = RULES[case]
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        source.check(schema(**values), **{**FITS, **change})
    assert time.monotonic() - started < 60
    # Nothing was made.
    assert not (cache / "tokens").exists()


def test_files_without_text(tmp_path, cache, model_file):
    (tmp_path / "empty.txt").write_text("")
    for tokenizer in (None, str(model_file)):
        with pytest.raises(ConfigError, match=r"^data\.files=.*empty\.txt: is empty; give files with text"):
            source.check(Files(files=str(tmp_path / "*.txt"), tokenizer=tokenizer), **FITS)
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    for tokenizer in (None, str(model_file)):
        config = Files(files=str(tmp_path / "*.jsonl"), tokenizer=tokenizer)
        with pytest.raises(ConfigError, match=r"^data.*no text"):
            source.prepare(config, report=lambda line: None)

"""data=stdlib and data=files: from text to batches, once, and the same for every process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import silent, text
from tests.data.test_indexed import SEQ, global_steps
from titanlab.data import source
from titanlab.data import text as text_kinds
from titanlab.data.corpus import is_held_out
from titanlab.data.schema import Files, Stdlib
from titanlab.data.shards import read_index
from titanlab.data.tokenizers import load
from titanlab.errors import ConfigError


def folder_in(cache: Path) -> Path:
    (folder,) = (each for each in (cache / "tokens").iterdir() if each.is_dir())
    return folder


def documents_in(folder: Path, split: str) -> list[str]:
    """The texts of a split, decoded from its tokens; checks that nothing stands between them."""
    index = read_index(folder)
    tokenizer = load(folder / str(index.tokenizer))
    found: list[str] = []
    for shard in index.split(split):
        tokens = np.fromfile(folder / shard.file, dtype=index.dtype)
        ends = np.flatnonzero(tokens == index.eos_id)
        for document in np.split(tokens, ends + 1)[:-1]:
            assert document[0] == index.bos_id
            found.append(tokenizer.decode(document[1:-1].tolist()))
        assert ends[-1] == len(tokens) - 1
        assert len(ends) == shard.documents
    return found


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(text(number))
    return folder


def config(corpus: Path, **changes: Any) -> Files:
    return Files(**{"files": str(corpus), "vocab_size": 330, "validation_fraction": 0.1, **changes})


def test_no_document_is_lost_and_none_is_in_both(corpus: Path, cache: Path) -> None:
    source.prepare(config(corpus), report=silent)
    train, validation = (documents_in(folder_in(cache), split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(text(number) for number in range(60))
    assert not set(train) & set(validation)
    assert set(validation) == {text(number) for number in range(60) if is_held_out(text(number), 0.1)}
    assert validation
    # In the order of the files.
    assert train == sorted(train, key=lambda each: int(each.split()[1]))


def test_copies_go_the_same_way(corpus: Path, cache: Path) -> None:
    for number in range(60):
        (corpus / f"copy-{number}.txt").write_text(text(number))
    source.prepare(config(corpus), report=silent)
    train, validation = (documents_in(folder_in(cache), split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 120
    assert not set(train) & set(validation)


def test_formats_give_the_same_tokens(tmp_path: Path, cache: Path, model_file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [text(number) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    orders = []
    for name in ("a.jsonl", "a.parquet"):
        how = config(tmp_path / name, tokenizer=str(model_file))
        source.prepare(how, report=silent)
        orders.append(global_steps(how, ranks=1, steps=20)[0])
    assert np.array_equal(*orders)


def test_order_for_ranks_and_resumption(corpus: Path, cache: Path) -> None:
    how = config(corpus)
    source.prepare(how, report=silent)
    whole, _ = global_steps(how, ranks=1, steps=12)
    first, state = global_steps(how, ranks=3, steps=5)
    second, _ = global_steps(how, ranks=4, steps=7, state=state)
    assert np.array_equal(whole, first + second)


@pytest.mark.parametrize("content", ["one document only, " * 200, "x\n" * 400])
def test_a_single_document_is_cut_at_its_end(tmp_path: Path, cache: Path, model_file: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    for fraction in (0.1, 0.5):
        how = config(tmp_path / "a.txt", tokenizer=str(model_file), validation_fraction=fraction)
        source.prepare(how, report=silent)
        folder = cache / "tokens" / f"files-{source.fingerprint(how)}"
        index = read_index(folder)
        train, held_out = index.tokens("train"), index.tokens("validation")
        assert held_out == pytest.approx(fraction * (train + held_out), abs=1)
        tokens = np.concatenate(
            [np.fromfile(folder / f"{split}-00000.bin", np.uint16) for split in ("train", "validation")]
        )
        tokenizer = source.tokenizer(how)
        assert tokenizer is not None
        assert tokenizer.decode(tokens.tolist()) == content


def test_shards_are_cut_between_documents(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlab.data import shards

    monkeypatch.setattr(shards.write_documents, "__kwdefaults__", {"tail_fraction": 0.0, "shard_tokens": 1000})
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 500)
    source.prepare(config(corpus), report=silent)
    index = read_index(folder_in(cache))
    assert len(index.train) > 3
    assert all(shard.tokens >= 1000 for shard in index.train[:-1])
    assert len(documents_in(folder_in(cache), "train")) == sum(shard.documents for shard in index.train)


def test_second_time_nothing_is_done(corpus: Path, cache: Path) -> None:
    lines: list[str] = []
    source.prepare(config(corpus), report=lines.append)
    assert any("training a tokenizer of 330 pieces" in line for line in lines)
    assert any("tokens to train on" in line for line in lines)
    before = {file: file.stat().st_mtime_ns for file in folder_in(cache).iterdir()}
    lines.clear()
    source.prepare(config(corpus), report=lines.append)
    assert not lines
    assert {file: file.stat().st_mtime_ns for file in folder_in(cache).iterdir()} == before


@pytest.mark.parametrize("damage", ["train-00000.bin", "index.json"])
def test_what_a_power_cut_left_is_made_again(corpus: Path, cache: Path, damage: str) -> None:
    how, lines = config(corpus), []
    source.prepare(how, report=silent)
    before = (folder_in(cache) / damage).read_bytes()
    (folder_in(cache) / damage).write_bytes(before[: len(before) // 2])
    source.check(how, seq_len=8, global_batch=2, ranks=1, vocab_size=2048)
    source.prepare(how, report=lines.append)
    assert "is damaged: making it again" in lines[0]
    assert (folder_in(cache) / damage).read_bytes() == before


def test_fingerprint_follows_content_and_config_and_not_paths(
    corpus: Path, cache: Path, tmp_path: Path, model_file: Path
) -> None:
    first = source.fingerprint(config(corpus))
    corpus.rename(tmp_path / "moved")
    moved = config(tmp_path / "moved")
    assert source.fingerprint(moved) == first
    source.prepare(moved, report=silent)
    assert source.fingerprint(moved) == first
    changed = [
        source.fingerprint(config(tmp_path / "moved", **change))
        for change in ({"vocab_size": 340}, {"validation_fraction": 0.2}, {"tokenizer": str(model_file)})
    ]
    (tmp_path / "moved" / "00.txt").write_text("other")
    changed.append(source.fingerprint(moved))
    assert len({first, *changed}) == 5


def test_three_processes_prepare_once(corpus: Path, cache: Path) -> None:
    program = """
import sys
from titanlab.data import source
from titanlab.data.schema import Files
config = Files(files=sys.argv[1], vocab_size=330, validation_fraction=0.1)
source.prepare(config, report=print)
stream = source.open_train(config, seed=0, seq_len=16, global_batch=4, rank=0, ranks=1)
print("tokens", stream.next_batch().tokens.tolist())
"""
    command = [sys.executable, "-c", program, str(corpus)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum("training a tokenizer" in each for each in said) == 1
    assert len({each[each.index("tokens [") :] for each in said}) == 1


def test_prepare_was_forgotten(corpus: Path, cache: Path) -> None:
    for ask in (
        lambda: source.open_train(config(corpus), seed=0, seq_len=4, global_batch=1, rank=0, ranks=1),
        lambda: source.open_validation(config(corpus), seq_len=4, sequences=1, rank=0, ranks=1),
        lambda: source.tokenizer(config(corpus)),
        lambda: source.vocab_size(config(corpus)),
    ):
        with pytest.raises(ConfigError, match="prepare the data first"):
            ask()


def test_stdlib_from_nothing_to_batches() -> None:
    # In the tests' own cache, which later runs find filled.
    how, lines = Stdlib(), []
    started = time.monotonic()
    source.prepare(how, report=lines.append)
    assert time.monotonic() - started < 60
    source.check(how, seq_len=SEQ, global_batch=4, ranks=2, vocab_size=2048, validation_sequences=8)
    assert source.vocab_size(how) == 2048
    tokenizer = source.tokenizer(how)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 2048
    stream = source.open_train(how, seed=0, seq_len=256, global_batch=4, rank=0, ranks=1)
    shown = tokenizer.decode(stream.next_batch().tokens.ravel().tolist())
    # Some three characters a token: the pieces are words and indentation, not bytes.
    assert len(shown) > 2 * 4 * 256
    assert "\n    " in shown
    rows = source.open_validation(how, seq_len=256, sequences=32, rank=0, ranks=2)
    assert len(rows) == 16


def test_stdlib_comes_back_from_its_tokens() -> None:
    how = Stdlib()
    source.prepare(how, report=silent)
    prepared = text_kinds.StdlibSource(how)
    found = documents_in(prepared.folder, "train") + documents_in(prepared.folder, "validation")
    written = list(prepared.corpus.documents())
    assert len(found) == len(written)
    assert {hashlib.sha256(each.encode()).digest() for each in found} == {
        hashlib.sha256(each.encode()).digest() for each in written
    }


def test_stdlib_leaves_out_what_differs_between_machines(tmp_path: Path) -> None:
    for name in (
        "abc.py", "json/decoder.py", "json/__pycache__/x.py", "test/a.py", "unittest/test/a.py", "site-packages/a.py",
        "_sysconfigdata__linux.py", "config-3.11-x/a.py", "encodings/cp1.py", "README.txt", "json/__init__.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(file.relative_to(tmp_path)) for file in text_kinds.source_files(tmp_path)]
    assert found == ["abc.py", "json/__init__.py", "json/decoder.py"]


def test_python_without_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(text_kinds.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="came without the source of its library.*; try data=files"):
        source.fingerprint(Stdlib())


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.txt", b"\xff\x00bad\xc3\x28", "a.txt, byte 0: is not UTF-8 text"),
        ("a.jsonl", b"no json\n", "a.jsonl:1: is not JSON"),
        ("a.parquet", b"PAR1", "a.parquet: is no readable parquet"),
        ("a.txt.gz", b"\x1f\x8b\x08", "a.txt.gz: is no whole .gz file"),
        ("a.txt", b"", "a.txt: is empty"),
        ("folder/", None, "folder: has no files"),
        ("nothing.txt", None, "nothing.txt: matches no file"),
    ],
    ids=["not UTF-8", "no JSON", "no parquet", "no gzip", "empty", "an empty folder", "missing"],
)
def test_a_bad_file_comes_before_the_vocabulary(
    tmp_path: Path, cache: Path, name: str, content: bytes, rule: str
) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="^data.files=") as refused:
        source.check(Files(files=str(path), vocab_size=2048), seq_len=8, global_batch=1, ranks=1, vocab_size=320)
    assert rule in str(refused.value)


def test_a_file_whose_sample_ends_within_a_character_is_good(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("a" + "é" * 70_000)
    source.check(Files(files=str(tmp_path), vocab_size=320), seq_len=8, global_batch=1, ranks=1, vocab_size=320)


def test_a_tokenizer_that_makes_nothing_of_the_text_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": {"Q": 0, "X": 1, "Z": 2}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = Files(files=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"makes no token of the text of a\.txt: it has 3 tokens"):
        source.prepare(config, report=lambda line: None)


@pytest.mark.parametrize("files", ["s3://bucket/a.jsonl", "corpus/a.txt:hf://datasets/x"])
def test_an_address_is_no_file(files):
    with pytest.raises(
        ConfigError, match="is an address, and files are read from folders of this host; copy it here, or"
    ):
        Files(files=files)


def test_a_folder_with_the_character_that_separates_files(tmp_path, monkeypatch):
    """`data.files=corpus` would be looked for in `a` and in `b/corpus`."""
    (tmp_path / "a:b").mkdir()
    monkeypatch.chdir(tmp_path / "a:b")
    with pytest.raises(
        ConfigError, match="data.files=corpus: is relative to .*a:b, whose ':' separates files; start in a f"
    ):
        Files(files="corpus")
    assert Files(files="/x/corpus:/y").files == "/x/corpus:/y"

"""Text that becomes token shards, once and the same for every process: data=files, data=stdlib, titanlab tokenize, data=tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import silent, text
from tests.data.test_streams import SEQ, folder_of, global_steps
from tests.refusals import refusal
from titanlab.data import source, write_token_shards
from titanlab.data.corpus import is_held_out, library_of_python
from titanlab.data.schema import Files, Stdlib, TokenFolder
from titanlab.data.shards import read_index
from titanlab.data.text import PreparedText, make_shards
from titanlab.data.tokenizers import load
from titanlab.errors import ConfigError


def folder_in(cache):
    (folder,) = (each for each in (cache / "tokens").iterdir() if each.is_dir())
    return folder


def documents_in(folder, split):
    """The texts of a split, decoded from its tokens; checks that nothing stands between them."""
    index = read_index(folder)
    tokenizer = load(folder / str(index.tokenizer))
    found = []
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
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(text(number))
    return folder


def config(corpus, **changes):
    return Files(**{"files": str(corpus), "vocab_size": 330, "validation_fraction": 0.1, **changes})


def test_no_document_is_lost_and_none_is_in_both(corpus, cache):
    source.prepare(config(corpus), report=silent)
    train, validation = (documents_in(folder_in(cache), split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(text(number) for number in range(60))
    assert not set(train) & set(validation)
    assert set(validation) == {text(number) for number in range(60) if is_held_out(text(number), 0.1)}
    assert validation
    # In the order of the files.
    assert train == sorted(train, key=lambda each: int(each.split()[1]))


def test_formats_give_the_same_tokens(tmp_path, cache, model_file):
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


@pytest.mark.parametrize("damage", ["train-00000.bin", "index.json"])
def test_what_a_power_cut_left_is_made_again(corpus, cache, damage):
    how, lines = config(corpus), []
    source.prepare(how, report=silent)
    before = (folder_in(cache) / damage).read_bytes()
    (folder_in(cache) / damage).write_bytes(before[: len(before) // 2])
    source.check(how, seq_len=8, global_batch=2, ranks=1, vocab_size=2048)
    source.prepare(how, report=lines.append)
    assert "is damaged: making it again" in lines[0]
    assert (folder_in(cache) / damage).read_bytes() == before


def test_fingerprint_follows_content_and_config_and_not_paths(corpus, cache, tmp_path, model_file):
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


def test_stdlib_from_nothing_to_batches():
    # In the tests' own cache, which later runs find filled.
    how, lines = Stdlib(), []
    started = time.monotonic()
    source.prepare(how, report=lines.append)
    assert time.monotonic() - started < 60
    source.check(how, seq_len=SEQ, global_batch=4, ranks=2, vocab_size=2048, validation_sequences=8)
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


def test_stdlib_leaves_out_what_differs_between_machines(tmp_path):
    for name in (
        "abc.py", "json/decoder.py", "json/__pycache__/x.py", "test/a.py", "unittest/test/a.py", "site-packages/a.py",
        "_sysconfigdata__linux.py", "config-3.11-x/a.py", "encodings/cp1.py", "README.txt", "json/__init__.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [str(file.relative_to(tmp_path)) for file in library_of_python(tmp_path).files]
    assert found == ["abc.py", "json/__init__.py", "json/decoder.py"]


def test_python_without_its_source(tmp_path, monkeypatch, cache):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="came without the source of its library.*; try data=files"):
        source.fingerprint(Stdlib())


def test_a_file_whose_sample_ends_within_a_character_is_good(tmp_path, cache):
    (tmp_path / "a.txt").write_text("a" + "é" * 70_000)
    source.check(Files(files=str(tmp_path), vocab_size=320), seq_len=8, global_batch=1, ranks=1, vocab_size=320)


def test_a_tokenizer_that_makes_nothing_of_the_text_is_refused(tmp_path, cache):
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


FITS = {"seq_len": 8, "vocab_size": 400, "validation_sequences": 0}


@pytest.fixture
def reader_of(corpus, model_file, cache):
    """`reader_of(…)`: the reader of files, before anything is prepared."""

    def make(**changes):
        given = {"files": str(corpus), "tokenizer": str(model_file), "validation_fraction": 0.1, **changes}
        reader = Files(**given).implementation()
        assert isinstance(reader, PreparedText)
        return reader

    return make


def test_before_it_is_prepared_there_is_no_index(reader_of):
    reader = reader_of()
    for ask in (reader.separators, lambda: reader.index):
        assert refusal(ask) == f"data=files: {reader.folder} is missing; prepare the data first"
    # A tokenizer that is named needs no corpus.
    assert reader.tokenizer().vocab_size == 400


def test_rules_that_need_the_tokens_are_checked_after(reader_of):
    reader = reader_of()
    # Nothing is known of the length yet.
    reader.check(**{**FITS, "seq_len": 10**6, "validation_sequences": 5})
    reader.prepare(report=silent)
    reader.check(**{**FITS, "validation_sequences": 5})
    assert refusal(reader.check, **{**FITS, "seq_len": 10**6}).startswith(
        "training.seq_len=1000000: the corpus is shorter"
    )


def test_progress_is_reported(reader_of, tmp_path, monkeypatch):
    lines = []
    # Half of what the corpus has.
    monkeypatch.setattr("titanlab.data.shards._REPORT_TOKENS", 4000)
    (tmp_path / "shards").mkdir()
    new = reader_of(tokenizer=None, vocab_size=330)
    index = make_shards(tmp_path / "shards", new.corpus, new.config, fingerprint="ab", report=lines.append)
    begins = [
        "reading 60 files, 0.0 MB: 60 .txt as text, one document a file",
        "training a tokenizer of 330 pieces",
        "trained it in ",
        "tokenising",
        "a document begins with token 1 and ends with token 2",
        "tokenised 0 million tokens",
    ]
    begins.append(f"{index.tokens('train'):,} tokens to train on and {index.tokens('validation'):,} held out after ")
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    assert (index.vocab_size, index.fingerprint, index.tokenizer) == (330, "ab", "tokenizer.model")


def test_tokenised_files_are_the_data_that_files_would_be(corpus, cache, tmp_path):
    index = write_token_shards(str(corpus), tmp_path / "made", vocab_size=330, validation_fraction=0.1, report=silent)
    tokens = TokenFolder(folder=str(tmp_path / "made"))
    files = Files(files=str(corpus), vocab_size=330, validation_fraction=0.1)
    for config in (tokens, files):
        source.prepare(config, report=silent)
        source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=330, validation_sequences=3)
    assert index.vocab_size == 330
    assert np.array_equal(global_steps(tokens, ranks=1, steps=5)[0], global_steps(files, ranks=2, steps=5)[0])
    tokenizer = source.tokenizer(tokens)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("def x:\n")) == "def x:\n"
    # Nothing but the folder was made, and nothing in the cache: it stands alone.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "corpus", "made"]


def test_a_folder_that_is_there_is_not_touched(corpus, tmp_path, cache, model_file):
    target = tmp_path / "deep" / "made"
    write_token_shards(str(corpus), target, tokenizer=str(model_file), report=silent)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(ConfigError, match=r"^folder=.*: exists already; name another"):
        write_token_shards(str(corpus), target, tokenizer=str(model_file), report=silent)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    empty = tmp_path / "empty"
    empty.mkdir()
    write_token_shards(str(corpus), empty, tokenizer=str(model_file), report=silent)
    assert {file.name: file.read_bytes() for file in empty.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "none.model"}, r"^--tokenizer=.*none\.model: does not exist; .*, or leave it out to train one$"),
        ({"files": ""}, r"^files=: names no file; give a file, a folder or a glob: corpus/\*\.jsonl$"),
        ({"vocab_size": 9999}, r"^--vocab-size=9999: the corpus is too small for it"),
        ({"validation_fraction": 0.9}, r"^--validation-fraction=0.9: must be between 0 and 0.5"),
        ({"files": "bad.jsonl", "text_field": "body"}, r"^--text-field=body: is not in .*its keys are: text"),
        ({"files": "empty.txt"}, r"^files=.*empty\.txt: "),
        ({"folder": Path("file/below")}, r"^folder=.*: cannot be written"),
    ],
)
def test_what_cannot_be_tokenised(corpus, tmp_path, monkeypatch, cache, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "file").write_text("")
    how = {"files": str(corpus), "folder": Path("made"), "vocab_size": 330, **changes}
    with pytest.raises(ConfigError, match=message):
        write_token_shards(how.pop("files"), how.pop("folder"), report=silent, **how)
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob(".made*"))


def test_a_file_that_may_not_be_read_is_one_line(corpus, tmp_path, cache, monkeypatch):
    def denied(files):
        raise PermissionError(13, "Permission denied", str(corpus / "03.txt"))

    monkeypatch.setattr("titanlab.data.cache.hash_of_files", denied)
    with pytest.raises(ConfigError) as caught:
        write_token_shards(str(corpus), tmp_path / "made", vocab_size=330, report=silent)
    assert str(caught.value) == f"files={corpus / '03.txt'}: cannot be read (Permission denied); check its permissions"
    assert not (tmp_path / "made").exists()


def test_a_full_disk_leaves_nothing(corpus, tmp_path, cache, model_file, monkeypatch):
    def full(*given, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titanlab.data.shards.write_index", full)
    with pytest.raises(ConfigError) as caught:
        write_token_shards(str(corpus), tmp_path / "made", tokenizer=str(model_file), report=silent)
    assert str(caught.value) == f"folder={tmp_path / 'made'}: cannot be written (No space left on device); make room"
    assert [each.name for each in tmp_path.iterdir() if each.name != "cache"] == ["corpus"]


def write_by_hand(folder, **changes):
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


def test_tokens_of_another_tool(tmp_path, cache):
    config = write_by_hand(tmp_path / "made")
    source.prepare(config, report=silent)
    source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=100)
    assert source.tokenizer(config) is None
    first = source.fingerprint(config)
    assert first == source.fingerprint(write_by_hand(tmp_path / "again"))
    np.arange(100, dtype="<u2")[::-1].tofile(tmp_path / "made" / "train.bin")
    assert source.fingerprint(config) != first


def test_rules(tmp_path):
    config = folder_of(tmp_path / "short", [60, 40])
    fits = {"seq_len": 8, "global_batch": 4, "ranks": 2, "vocab_size": 100}
    source.check(config, **fits)
    for change, message in (
        ({"seq_len": 60}, r"training\.seq_len=60: the corpus is shorter than one sequence.*; try 59 or less"),
        ({"validation_sequences": 1}, r"data\.folder=.*: holds nothing out to validate on"),
    ):
        with pytest.raises(ConfigError, match=message):
            source.check(config, **{**fits, **change})
    # One token is not a sequence: nothing is left to validate on.
    one = folder_of(tmp_path / "one", [60], [1])
    with pytest.raises(ConfigError, match="holds nothing out to validate on"):
        source.check(one, **fits, validation_sequences=1)
    with pytest.raises(ConfigError, match="it has 1 tokens to train on; give more text"):
        source.check(folder_of(tmp_path / "none", [1]), **{**fits, "vocab_size": 100})
    source.check(config, **{**fits, "seq_len": 59})

"""Where documents begin, found from the tokens of every kind of data, is where they were put together."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from tests.data.conftest import silent, text
from tests.data.test_hf import made as hf_made
from tests.data.test_hf import tokens_of_stream
from tests.data.test_text_kinds import write_by_hand
from tests.planted_schema import Planted
from titanlab.data import Synthetic, source
from titanlab.data.contract import Separators
from titanlab.data.corpus import is_held_out
from titanlab.data.indexed import Split
from titanlab.data.schema import Files, TokenFolder
from titanlab.errors import ConfigError

SEQ = 24


@pytest.mark.parametrize(
    ("separators", "tokens", "starts"),
    [
        # 1 begins and 2 ends a document; the first and the last are cut.
        (Separators(begin=1, end=2), [7, 2, 1, 8, 2, 1, 2, 1, 9], [0, 0, 2, 2, 2, 5, 5, 7, 7]),
        (Separators(end=2), [7, 2, 8, 8, 2, 2, 2, 9], [0, 0, 2, 2, 2, 5, 6, 7]),
        (Separators(begin=1), [7, 1, 8, 1, 1, 9], [0, 1, 1, 3, 4, 4]),
        # One token is both, as GPT-2's: twice in a row it is an end and a beginning.
        (Separators(begin=3, end=3), [3, 7, 3, 3, 8, 8, 3, 3, 9], [0, 0, 0, 3, 3, 3, 3, 7, 7]),
        (Separators(end=2), [7, 8, 9], [0, 0, 0]),
        (Separators(end=2), [2], [0]),
    ],
)
def test_where_documents_begin(separators, tokens, starts):
    # Nothing of a sequence reaches into the next one.
    rows = np.array(
        [[2, 3, 3, 2, 1][: len(tokens)] + [9] * (len(tokens) - 5), tokens, [9] * len(tokens)], dtype=np.int64
    )
    found = separators.starts(rows)
    assert found.dtype == np.int64
    assert found.tolist()[1:] == [starts, [0] * len(tokens)]


def cut(lengths, count):
    """Starts in `count` sequences of documents of these lengths, one after another: `[count, SEQ]`."""
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[: count * SEQ].reshape(count, SEQ)
    return np.maximum(begins - np.arange(count)[:, None] * SEQ, 0)


@pytest.fixture
def corpus(tmp_path):
    """Documents longer than a sequence, and of one word; one has the special tokens' names in its text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [text(number, words=5 + 37 * (number % 3)) for number in range(20)]
    texts += ["a", "\n", "<s> and </s> <|begin|><|end|> are text here"]
    lines = [json.dumps({"text": each}) + "\n" for each in texts]
    (folder / "0.jsonl").write_text("".join(lines))
    return folder


def texts_of(corpus):
    return [json.loads(line)["text"] for line in (corpus / "0.jsonl").read_text().splitlines()]


def lengths_of(texts, config):
    """Tokens of each document with its special tokens, encoded one by one."""
    tokenizer = source.tokenizer(config)
    assert tokenizer is not None
    # One token that begins and ends documents stands once.
    special = len({tokenizer.bos_id, tokenizer.eos_id} - {None})
    return [len(tokenizer.encode(each)) + special for each in texts]


def same_token_file(json_file, folder):
    """The tokenizer with one token that begins and ends documents."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(json_file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>", "eos_token": "<|end|>"}))
    return folder


@pytest.mark.parametrize("kind", ["sentencepiece", "json", "one token"])
def test_of_prepared_text(corpus, cache, model_file, json_file, kind):
    files = {"sentencepiece": model_file, "json": json_file}
    tokenizer = files.get(kind) or same_token_file(json_file, corpus.parent / "same")
    config = Files(files=str(corpus), tokenizer=str(tokenizer), validation_fraction=0.1, document_mask=True)
    source.check(config, seq_len=SEQ, global_batch=1, ranks=1, vocab_size=400)
    source.prepare(config, report=silent)
    implementation = config.implementation()
    split = Split(implementation.folder, implementation.index, "train", SEQ)
    batch = split.gather(np.arange(split.sequences))
    kept = [each for each in texts_of(corpus) if not is_held_out(each, 0.1)]
    assert len(kept) < len(texts_of(corpus))
    found = source.separators(config).starts(batch.tokens)
    assert np.array_equal(found, cut(lengths_of(kept, config), split.sequences))
    # And the same shards, as a folder.
    again = TokenFolder(folder=str(implementation.folder), document_mask=True)
    source.prepare(again, report=silent)
    source.check(again, seq_len=SEQ, global_batch=1, ranks=1, vocab_size=400)
    assert source.separators(again) == source.separators(config)


def test_of_a_streamed_dataset(corpus, cache, model_file):
    config = hf_made(corpus / "*.jsonl", model_file, streams=1, document_mask=True, prefetch=0)
    source.check(config, seq_len=SEQ, global_batch=1, ranks=1, vocab_size=400)
    source.prepare(config, report=silent)
    count = 10
    from tests.data.test_streams import SEQ as STEP

    tokens = np.array(tokens_of_stream(config, count * SEQ // STEP)[0][: count * SEQ]).reshape(count, SEQ)
    kept = [each for each in texts_of(corpus) if not is_held_out(each, 0.1)]
    assert np.array_equal(source.separators(config).starts(tokens), cut(lengths_of(kept, config), count))


def test_of_synthetic_tokens():
    config = Synthetic(vocab_size=100, document_mask=True, document_tokens=10)
    stream = source.open_train(config, seed=0, seq_len=512, global_batch=64, rank=0, ranks=1)
    tokens, labels = stream.next_batch()
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    # 64 · 512 tokens: the share of ends is 0.1 within four standard deviations.
    assert abs((tokens == 0).mean() - 0.1) < 4 * np.sqrt(0.1 * 0.9 / tokens.size)
    assert tokens.max() == 99
    starts = source.separators(config).starts(tokens)
    assert np.array_equal(starts[:, 1:] == np.arange(1, 512), tokens[:, :-1] == 0)
    # Without documents the tokens are those of earlier versions, and so is the fingerprint.
    plain = Synthetic(vocab_size=100)
    assert source.fingerprint(plain) == "synthetic-1-100"
    assert source.fingerprint(config) != source.fingerprint(plain)
    without = source.open_train(plain, seed=0, seq_len=512, global_batch=64, rank=0, ranks=1).next_batch().tokens
    assert np.array_equal(np.where(tokens == 0, 0, np.maximum(without, 1)), tokens)
    tokens, labels = next(iter(source.open_validation(config, seq_len=512, sequences=1, rank=0, ranks=1)))
    assert (tokens == 0).any()


def test_tokens_of_another_tool_need_only_one_of_the_ids(tmp_path, cache):
    folder = write_by_hand(tmp_path / "made", eos_id=49).folder
    config = TokenFolder(folder=folder, document_mask=True)
    source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=100)
    source.prepare(config, report=silent)
    assert source.separators(config).starts(np.arange(48, 56)[None]).tolist() == [[0, 0, 2, 2, 2, 2, 2, 2]]


@dataclass(frozen=True, kw_only=True)
class Masked(Planted):
    """A kind of data that has the key, and whose source does not say which tokens separate documents."""

    document_mask: bool = True


def refused(config, line):
    with pytest.raises(ConfigError) as error:
        source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=400)
        source.prepare(config, report=silent)
        source.check(config, seq_len=8, global_batch=4, ranks=2, vocab_size=400)
    assert line in str(error.value)


def test_what_does_not_say_where_documents_begin_is_refused(tmp_path, corpus, cache, json_file):
    folder = write_by_hand(tmp_path / "made").folder
    refused(
        TokenFolder(folder=folder, document_mask=True),
        "data.document_mask=true: index.json has neither a token that begins a document nor one that ends it; "
        "name bos_id or eos_id in it, or try false",
    )
    # An id that no token has; and one token for both, but never twice in a row.
    for ids in ({"eos_id": 99, "train": [{"file": "train.bin", "tokens": 100}]}, {"eos_id": 5, "bos_id": 5}):
        config = TokenFolder(folder=write_by_hand(tmp_path / "made", **ids).folder, document_mask=True)
        refused(config, "data.document_mask=true: no document ends in the first 1,048,576 tokens of any file; check")
    bare = tmp_path / "bare"
    bare.mkdir()
    made = json.loads(json_file.read_text())
    made["added_tokens"] = []
    made["model"]["vocab"] = {
        {"<|begin|>": "b|", "<|end|>": "e|"}.get(token, token): number
        for token, number in made["model"]["vocab"].items()
    }
    (bare / "tokenizer.json").write_text(json.dumps(made))
    rule = "data.document_mask=true: the tokenizer has neither a token that begins a document nor one that ends it"
    refused(Files(files=str(corpus), tokenizer=str(bare), document_mask=True), rule)
    refused(hf_made(corpus / "*.jsonl", bare, streams=4, document_mask=True), rule)
    refused(Masked(), "data.document_mask=true: data=planted does not say where documents begin; try false")
    with pytest.raises(ConfigError, match="data.document_tokens=0: must be at least 1; try 256"):
        Synthetic(document_tokens=0)

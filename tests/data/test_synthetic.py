"""Random tokens: each depends on its number only, one order for any number of ranks, and held-out rows are others."""

from __future__ import annotations

import numpy as np
import pytest

from titanlab.data import Synthetic, source
from titanlab.data.contract import IGNORE
from titanlab.data.synthetic import random_sequences


def numbered(*numbers, **given):
    return random_sequences(np.array(numbers, dtype=np.int64), **{"seed": 3, "seq_len": 5, "vocab_size": 97, **given})


def stream(*, vocab_size=97, gaps=False, seq_len=4):
    config = Synthetic(vocab_size=vocab_size, gaps=gaps)
    return source.open_train(config, seed=3, seq_len=seq_len, global_batch=6, rank=0, ranks=1)


def test_the_tokens_are_fixed_for_all_time():
    found = numbered(0, 1, seed=0, vocab_size=1000).tolist()
    assert found == [[338, 269, 271, 480, 597, 433], [138, 971, 277, 902, 657, 315]]


def test_labels_of_gaps_do_not_count():
    plain, gaps = stream(), stream(gaps=True)
    tokens, labels = gaps.next_batch()
    assert (tokens == plain.next_batch().tokens).all()
    # Of sample g, g % 4 quarters.
    assert (labels == IGNORE).sum(axis=1).tolist() == [0, 1, 2, 3, 0, 1]
    assert [row.tolist().index(IGNORE) for row in labels[1:4]] == [0, 0, 0]
    assert (labels[5, 1:] != IGNORE).all()


@pytest.mark.parametrize(("count", "ranks", "each"), [(5, 2, 3), (4, 2, 2), (1, 3, 1), (0, 2, 0), (7, 1, 7)])
def test_held_out_rows_are_shared_and_padded(count, ranks, each):
    config, how = Synthetic(vocab_size=97), {"seq_len": 4, "sequences": count, "ranks": ranks}
    parts = [source.open_validation(config, rank=rank, **how) for rank in range(ranks)]
    assert [len(part) for part in parts] == [each] * ranks
    rows = {}
    for rank, part in enumerate(parts):
        found = list(part)
        assert len(found) == each
        assert [tokens.tolist() for tokens, _ in found] == [tokens.tolist() for tokens, _ in part]
        rows |= {rank + ranks * place: row for place, row in enumerate(found)}
    whole = numbered(*range(each * ranks), seed=-1, seq_len=4)
    for number, (tokens, labels) in rows.items():
        assert number >= count or tokens.tolist() == whole[number, :-1].tolist()
        assert labels.tolist() == (whole[number, 1:].tolist() if number < count else [IGNORE] * 4)


def test_held_out_rows_are_of_no_stream():
    config = Synthetic(vocab_size=2**30)
    ((tokens, _),) = source.open_validation(config, seq_len=50, sequences=1, rank=0, ranks=1)
    assert not set(tokens.tolist()) & set(stream(vocab_size=2**30, seq_len=50).next_batch().tokens.ravel().tolist())

"""Random tokens: the same order for any number of ranks, even, and held-out rows of their own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_indexed import SEQ, global_steps
from titanlab.data import Synthetic, source


@given(before=st.sampled_from([1, 2, 3, 4]), after=st.sampled_from([1, 2, 3, 4]), stop=st.integers(0, 5))
def test_order_is_the_same_for_any_number_of_ranks(before: int, after: int, stop: int) -> None:
    config = Synthetic(vocab_size=97)
    whole, _ = global_steps(config, ranks=1, steps=6)
    first, state = global_steps(config, ranks=before, steps=stop)
    second, _ = global_steps(config, ranks=after, steps=6 - stop, state=state)
    assert np.array_equal(whole, first + second)


def test_tokens_are_even_and_in_the_vocabulary() -> None:
    stream = source.open_train(Synthetic(vocab_size=50), seed=1, seq_len=500, global_batch=200, rank=0, ranks=1)
    tokens = stream.next_batch().tokens
    assert tokens.min() >= 0
    assert tokens.max() < 50
    counts = np.bincount(tokens.ravel(), minlength=50)
    # 100,000 draws over 50 tokens: 2,000 ± 5 sigma.
    assert np.all(np.abs(counts - 2000) < 5 * np.sqrt(2000))


def test_seeds_differ() -> None:
    first, second = (global_steps(Synthetic(), ranks=1, steps=1, seed=seed)[0][0] for seed in (0, 1))
    assert (first == second).mean() < 0.1


def test_held_out_rows_are_fixed_and_of_no_stream() -> None:
    config = Synthetic(vocab_size=1000)
    rows = [list(source.open_validation(config, seq_len=SEQ, sequences=5, rank=rank, ranks=2)) for rank in range(2)]
    assert [len(each) for each in rows] == [3, 3]
    assert sum(int((labels == source.IGNORE).all()) for each in rows for _, labels in each) == 1
    alone = list(source.open_validation(config, seq_len=SEQ, sequences=5, rank=0, ranks=1))
    assert np.array_equal(rows[1][0][0], alone[1][0])
    trained, _ = global_steps(config, ranks=1, steps=2)
    held_out = {row.tobytes() for row, _ in alone}
    assert not held_out & {row.tobytes() for batch in trained for row in batch}

"""Rules between data, model, batch and layout: what fits passes, and what does not is told with numbers that do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from titanlab.data.shards import ShardIndex, TokenShard
from titanlab.data.source import (
    check_multiple,
    check_sequences,
    check_validation,
    check_vocab_size,
    multiples_around,
)
from titanlab.errors import ConfigError


def index(train: tuple[int, ...] = (), validation: tuple[int, ...] = ()) -> ShardIndex:
    """Files of so many tokens."""
    return ShardIndex(
        dtype="uint16",
        vocab_size=9,
        train=tuple(TokenShard(file="t", tokens=tokens) for tokens in train),
        validation=tuple(TokenShard(file="v", tokens=tokens) for tokens in validation),
    )


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_multiple("training.global_batch", 12, 1),
        lambda: check_multiple("training.global_batch", 12, 4),
        lambda: check_multiple("training.global_batch", 12, 12),
        lambda: check_vocab_size(10, 10),
        lambda: check_vocab_size(11, 10),
        lambda: check_sequences(index((9,)), 8),
        lambda: check_sequences(index((1, 9, 1)), 8),
        lambda: check_validation(index((), (2,)), "k", 0.1),
        lambda: check_validation(index((), (1, 1)), "k", 0.1),
        lambda: check_multiple("data.streams", 24, 8),
    ],
)
def test_what_fits_passes(check: Callable[[], None]) -> None:
    check()


NOTHING = "holds nothing out to validate on; hold some out, or training.validate_every=0"
SHORT = "the corpus is shorter than one sequence: it has"


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (
            lambda: check_multiple("training.global_batch", 12, 5),
            "training.global_batch=12: must be a multiple of the 5 data-parallel processes; try 10 or 15",
        ),
        (
            lambda: check_multiple("training.global_batch", 3, 8),
            "training.global_batch=3: must be a multiple of the 8 data-parallel processes; try 8",
        ),
        (
            lambda: check_vocab_size(9, 10),
            "model.vocab_size=9: is smaller than the 10 tokens of the data's vocabulary; try model.vocab_size=10",
        ),
        (
            lambda: check_sequences(index((8, 5)), 8),
            f"training.seq_len=8: {SHORT} 13 tokens to train on; try 7 or less, or give more text",
        ),
        (lambda: check_sequences(index((1,)), 8), f"training.seq_len=8: {SHORT} 1 tokens to train on; give more text"),
        (lambda: check_sequences(index(), 8), f"training.seq_len=8: {SHORT} 0 tokens to train on; give more text"),
        (lambda: check_validation(None, "k", 0.0), f"k=0.0: {NOTHING}"),
        (lambda: check_validation(index((50,), ()), "k", 0.1), f"k=0.1: {NOTHING}"),
        (lambda: check_validation(index((50,), (1,)), "k", 0.1), f"k=0.1: {NOTHING}"),
        (
            lambda: check_multiple("data.streams", 24, 5),
            "data.streams=24: must be a multiple of the 5 data-parallel processes; try 20 or 25",
        ),
    ],
)
def test_what_does_not_fit_is_told(check: Callable[[], None], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("value", "step", "said"), [(7, 3, "6 or 9"), (9, 3, "9 or 12"), (2, 3, "3"), (1, 1, "1 or 2"), (0, 4, "4")]
)
def test_the_nearest_multiples(value: int, step: int, said: str) -> None:
    assert multiples_around(value, step) == said

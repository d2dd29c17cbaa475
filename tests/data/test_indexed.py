"""The stream of token shards: one global order for every number of ranks and every resumption."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.data import source
from titanlab.data.schema import TokenFolder
from titanlab.data.shards import ShardIndex, TokenShard, write_index
from titanlab.errors import ConfigError

SEQ = 8


def folder_of(folder: Path, train: Sequence[int], validation: Sequence[int] = (), dtype: str = "uint16") -> TokenFolder:
    """Shards of so many tokens each; every token is its own place in the whole."""
    folder.mkdir(parents=True)
    shards: dict[str, list[TokenShard]] = {"train": [], "validation": []}
    next_token = 0
    for name, sizes in (("train", train), ("validation", validation)):
        for number, size in enumerate(sizes):
            np.arange(next_token, next_token + size).astype(dtype).tofile(folder / f"{name}-{number}.bin")
            shards[name].append(TokenShard(file=f"{name}-{number}.bin", tokens=size))
            next_token += size
    write_index(
        folder,
        ShardIndex(
            dtype=dtype, vocab_size=next_token, train=tuple(shards["train"]), validation=tuple(shards["validation"])
        ),
    )
    return TokenFolder(folder=str(folder))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """38 sequences in three files, none of which ends with a whole one, and one file shorter than a sequence."""
    return folder_of(tmp_path_factory.mktemp("tokens") / "folder", [123, 5, 90, 100], [50])


def global_steps(
    config: object, *, ranks: int, steps: int, batch: int = 12, seed: int = 3, state: source.State | None = None
) -> tuple[list[np.ndarray], source.State]:
    """Tokens of each global batch in the global order, and the merged state after them."""
    streams = [
        source.open_train(config, seed=seed, seq_len=SEQ, global_batch=batch, rank=rank, ranks=ranks, state=state)
        for rank in range(ranks)
    ]
    start = 0 if state is None else state["samples"]
    found = []
    for step in range(steps):
        whole = np.full((batch, SEQ), -1)
        for rank, stream in enumerate(streams):
            given_tokens, labels = stream.next_batch()
            assert given_tokens.dtype == labels.dtype == np.int64
            assert given_tokens.shape == labels.shape == (batch // ranks, SEQ)
            assert np.array_equal(given_tokens[:, 1:], labels[:, :-1])
            mine = [g for g in range(start + step * batch, start + (step + 1) * batch) if g % ranks == rank]
            whole[np.array(mine) - start - step * batch] = given_tokens
        found.append(whole)
    state = source.merge_states([json.loads(json.dumps(stream.state())) for stream in streams])
    for stream in streams:
        stream.close()
    return found, state


@given(ranks=st.sampled_from([2, 3, 4, 6, 12]), seed=st.integers(0, 2**40))
def test_order_is_the_same_for_any_number_of_ranks(tokens: TokenFolder, ranks: int, seed: int) -> None:
    alone, _ = global_steps(tokens, ranks=1, steps=5, seed=seed)
    together, _ = global_steps(tokens, ranks=ranks, steps=5, seed=seed)
    assert np.array_equal(alone, together)


@given(before=st.sampled_from([1, 2, 3, 4]), after=st.sampled_from([1, 2, 3, 4]), stop=st.integers(0, 8))
def test_resumes_at_any_step_with_any_number_of_ranks(tokens: TokenFolder, before: int, after: int, stop: int) -> None:
    whole, end = global_steps(tokens, ranks=1, steps=9)
    first, state = global_steps(tokens, ranks=before, steps=stop)
    second, same_end = global_steps(tokens, ranks=after, steps=9 - stop, state=state)
    assert np.array_equal(whole, first + second)
    assert same_end == end


@given(first=st.sampled_from([1, 2, 5, 7]), second=st.sampled_from([3, 6, 9]), ranks=st.sampled_from([1, 3]))
def test_resumes_with_another_global_batch(tokens: TokenFolder, first: int, second: int, ranks: int) -> None:
    whole, _ = global_steps(tokens, ranks=1, steps=6 * second + first, batch=1)
    begun, state = global_steps(tokens, ranks=1, steps=1, batch=first)
    rest, _ = global_steps(tokens, ranks=ranks, steps=6, batch=second, state=state)
    assert np.array_equal(np.concatenate(whole), np.concatenate(begun + rest))


def test_epoch_has_every_sequence_once(tokens: TokenFolder) -> None:
    n = 122 // SEQ + 89 // SEQ + 99 // SEQ
    first, _ = global_steps(tokens, ranks=1, steps=n, batch=1)
    starts = sorted(int(batch[0, 0]) for batch in first)
    assert starts == [
        begin + SEQ * row for begin, size in ((0, 123), (128, 90), (218, 100)) for row in range((size - 1) // SEQ)
    ]
    both, _ = global_steps(tokens, ranks=1, steps=2 * n, batch=1)
    second = [int(batch[0, 0]) for batch in both[n:]]
    assert sorted(second) == starts
    assert second != [int(batch[0, 0]) for batch in first]


def test_label_is_the_next_token(tokens: TokenFolder) -> None:
    stream = source.open_train(tokens, seed=0, seq_len=SEQ, global_batch=4, rank=0, ranks=1)
    batch = stream.next_batch()
    assert np.array_equal(batch.labels, batch.tokens + 1)


@given(sequences=st.integers(1, 12), ranks=st.integers(1, 5))
def test_held_out_rows(tokens: TokenFolder, sequences: int, ranks: int) -> None:
    rows = [
        list(source.open_validation(tokens, seq_len=SEQ, sequences=sequences, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    # Equally many for each, so that no rank waits for another's last one.
    assert {len(each) for each in rows} == {math.ceil(min(sequences, 7) / ranks)}
    valid = [int(label) for each in rows for _, labels in each for label in labels if label != source.IGNORE]
    assert len(valid) == len(set(valid))
    # Training has tokens 0 … 317, validation 318 … 367, whose first is no label.
    assert set(valid) <= set(range(319, 368))
    if sequences >= 7:
        assert set(valid) == set(range(319, 368))
    inputs = {int(token) for each in rows for row, labels in each for token in row[labels != source.IGNORE]}
    assert inputs == {label - 1 for label in valid}


def test_few_held_out_rows_are_spread_over_all_of_them(tokens: TokenFolder) -> None:
    rows = source.open_validation(tokens, seq_len=SEQ, sequences=3, rank=0, ranks=1)
    # Of seven.
    assert [int(labels[0]) for _, labels in rows] == [319 + SEQ * row for row in (0, 2, 4)]


def test_held_out_rows_are_the_same_in_every_pass(tokens: TokenFolder) -> None:
    rows = source.open_validation(tokens, seq_len=SEQ, sequences=5, rank=0, ranks=2)
    assert len(rows) == 3
    for (tokens_1, labels_1), (tokens_2, labels_2) in zip(rows, rows, strict=True):
        assert np.array_equal(tokens_1, tokens_2)
        assert np.array_equal(labels_1, labels_2)


def test_large_tokens_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    np.array([0, 2**32 - 2, 70000, 5], dtype="<u4").tofile(folder / "a.bin")
    write_index(folder, ShardIndex(dtype="uint32", vocab_size=2**32 - 1, train=(TokenShard(file="a.bin", tokens=4),)))
    stream = source.open_train(TokenFolder(folder=str(folder)), seed=0, seq_len=3, global_batch=1, rank=0, ranks=1)
    assert stream.next_batch().tokens.tolist() == [[0, 2**32 - 2, 70000]]


@pytest.mark.parametrize(
    ("change", "value", "key"),
    [("seed", 4, "seed"), ("seq_len", SEQ + 1, "training.seq_len"), ("fingerprint", None, "data")],
)
def test_state_of_another_stream_is_refused(
    tokens: TokenFolder, tmp_path: Path, change: str, value: int | None, key: str
) -> None:
    _, state = global_steps(tokens, ranks=1, steps=1)
    how = {"seed": 3, "seq_len": SEQ, change: value}
    if change == "fingerprint":
        del how[change]
        tokens = folder_of(tmp_path / "other", [200])
    with pytest.raises(ConfigError, match="the checkpoint stands in the data of") as caught:
        source.open_train(tokens, global_batch=2, rank=0, ranks=1, state=state, **how)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_states_of_different_steps_are_not_merged(tokens: TokenFolder) -> None:
    states = [global_steps(tokens, ranks=1, steps=steps)[1] for steps in (1, 2)]
    with pytest.raises(ValueError, match="different positions"):
        source.merge_states(states)


def test_next_batch_costs_microseconds(tmp_path: Path) -> None:
    config = folder_of(tmp_path / "big", [2**16 - 100])
    stream = source.open_train(config, seed=0, seq_len=512, global_batch=8, rank=0, ranks=1)
    times = []
    for _ in range(300):
        start = time.perf_counter()
        stream.next_batch()
        times.append(time.perf_counter() - start)
    # Some 10 µs on an idle machine; the median, since others use the cores too.
    assert sorted(times)[150] < 100e-6

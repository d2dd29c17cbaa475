"""Streams: one global order for every number of ranks and every resumption, no token lost or given twice, and states that are checked."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.data import source
from titanlab.data.contract import check_state, merge_states
from titanlab.data.indexed import keyed, shuffled
from titanlab.data.schema import TokenFolder
from titanlab.data.shards import ShardIndex, TokenShard, write_index
from titanlab.errors import ConfigError, DamagedPosition

SEQ = 8


def folder_of(folder, train, validation=(), dtype="uint16"):
    """Shards of so many tokens each; every token is its own place in the whole."""
    folder.mkdir(parents=True)
    shards = {"train": [], "validation": []}
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
def tokens(tmp_path_factory):
    """38 sequences in three files, none of which ends with a whole one, and one file shorter than a sequence."""
    return folder_of(tmp_path_factory.mktemp("tokens") / "folder", [123, 5, 90, 100], [50])


def global_steps(config, *, ranks, steps, batch=12, seed=3, state=None):
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
def test_order_is_the_same_for_any_number_of_ranks(tokens, ranks, seed):
    alone, _ = global_steps(tokens, ranks=1, steps=5, seed=seed)
    together, _ = global_steps(tokens, ranks=ranks, steps=5, seed=seed)
    assert np.array_equal(alone, together)


@given(before=st.sampled_from([1, 2, 3, 4]), after=st.sampled_from([1, 2, 3, 4]), stop=st.integers(0, 8))
def test_resumes_at_any_step_with_any_number_of_ranks(tokens, before, after, stop):
    whole, end = global_steps(tokens, ranks=1, steps=9)
    first, state = global_steps(tokens, ranks=before, steps=stop)
    second, same_end = global_steps(tokens, ranks=after, steps=9 - stop, state=state)
    assert np.array_equal(whole, first + second)
    assert same_end == end


@given(first=st.sampled_from([1, 2, 5, 7]), second=st.sampled_from([3, 6, 9]), ranks=st.sampled_from([1, 3]))
def test_resumes_with_another_global_batch(tokens, first, second, ranks):
    whole, _ = global_steps(tokens, ranks=1, steps=6 * second + first, batch=1)
    begun, state = global_steps(tokens, ranks=1, steps=1, batch=first)
    rest, _ = global_steps(tokens, ranks=ranks, steps=6, batch=second, state=state)
    assert np.array_equal(np.concatenate(whole), np.concatenate(begun + rest))


@given(sequences=st.integers(1, 12), ranks=st.integers(1, 5))
def test_held_out_rows(tokens, sequences, ranks):
    rows = [
        list(source.open_validation(tokens, seq_len=SEQ, sequences=sequences, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    # Equally many for each, so that no rank waits for another's last one.
    assert {len(each) for each in rows} == {math.ceil(min(sequences, 7) / ranks)}
    valid = [int(label) for each in rows for _, labels in each for label in labels if label != source.IGNORE]
    assert len(valid) == len(set(valid))
    # Training has tokens 0 … 317, validation 318 … 367, whose first is not a label.
    assert set(valid) <= set(range(319, 368))
    if sequences >= 7:
        assert set(valid) == set(range(319, 368))
    inputs = {int(token) for each in rows for row, labels in each for token in row[labels != source.IGNORE]}
    assert inputs == {label - 1 for label in valid}


def test_few_held_out_rows_are_spread_over_all_of_them(tokens):
    rows = source.open_validation(tokens, seq_len=SEQ, sequences=3, rank=0, ranks=1)
    # Of seven.
    assert [int(labels[0]) for _, labels in rows] == [319 + SEQ * row for row in (0, 2, 4)]


ANY_SEED = st.integers(0, 2**64)


@given(n=st.integers(1, 3000), seed=ANY_SEED, epoch=st.integers(0, 5))
def test_every_epoch_has_each_thing_once(n, seed, epoch):
    order = shuffled(np.arange(epoch * n, (epoch + 1) * n), seed=seed, n=n)
    assert np.array_equal(np.sort(order), np.arange(n))


def test_seeds_and_epochs_have_orders_of_their_own():
    n = 500
    orders = {
        tuple(shuffled(np.arange(epoch * n, (epoch + 1) * n), seed=seed, n=n).tolist())
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_order_is_fixed_for_all_time():
    # A change would silently give resumed runs other data.
    assert shuffled(np.arange(12), seed=7, n=12).tolist() == [5, 10, 4, 11, 1, 9, 8, 2, 6, 3, 7, 0]
    assert shuffled(np.array([10**12 + 5]), seed=7, n=999_983).tolist() == [310170]
    assert int(keyed(0, np.array([0]))[0]) == 0x48218226FF3CD4BF


@pytest.mark.parametrize("other", [{"samples": 5}, {"samples": 4, "seed": 0}, {}])
def test_states_of_different_places_are_not_merged(other):
    with pytest.raises(ValueError, match="data states of different positions cannot be merged: "):
        merge_states([{"samples": 4}, other])


def test_parts_of_all_ranks_are_put_together_in_their_order():
    merged = merge_states([{"samples": 4, "parts": {"2": "c", "0": "a"}}, {"parts": {"1": "b"}, "samples": 4}])
    assert (merged["samples"], list(merged["parts"].items())) == (4, [("0", "a"), ("1", "b"), ("2", "c")])


@pytest.mark.parametrize(
    ("name", "now", "key"),
    [
        ("seq_len", 8, "training.seq_len"),
        ("seed", 8, "seed"),
        ("streams", 8, "data.streams"),
        ("fingerprint", "g", "data"),
    ],
)
def test_a_state_of_another_stream_is_refused(name, now, key):
    saved = 4 if isinstance(now, int) else "f"
    with pytest.raises(ConfigError) as caught:
        check_state({"samples": 0, name: saved}, **{name: now})
    assert not isinstance(caught.value, DamagedPosition)
    assert str(caught.value).startswith(
        f"{key}={now}: the checkpoint was made with data of {name} {saved}; resume with"
    )


@pytest.mark.parametrize("value", [None, "3", 3.0, True, [3]])
def test_a_value_of_another_type_is_damage(value):
    with pytest.raises(DamagedPosition, match=r"^data\.seed=.*: must be what a stream saves .*; resume from another"):
        check_state({"samples": 0, "seed": value}, seed=3)


@pytest.mark.parametrize("value", [None, "3", 3.0, True, -1, 2**62])
def test_samples_are_a_count(value):
    with pytest.raises(DamagedPosition, match=r"^data\.samples=.*: must be what a stream saves"):
        check_state({"samples": value})


def test_any_seed_of_a_recipe_is_taken():
    check_state({"samples": 0, "seed": 2**63 - 1}, seed=2**63 - 1)

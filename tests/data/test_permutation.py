"""The seeded order: a bijection, another for each seed and epoch, and without a pattern."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titanlab.data.indexed import keyed, mix, shuffled

SEEDS = st.integers(0, 2**64)


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 5))
def test_every_epoch_has_each_thing_once(n: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(epoch * n, (epoch + 1) * n), seed=seed, n=n)
    assert np.array_equal(np.sort(order), np.arange(n))


@given(n=st.integers(1, 10**12), seed=SEEDS, samples=st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
def test_a_place_does_not_depend_on_its_company(n: int, seed: int, samples: list[int]) -> None:
    together = shuffled(np.array(samples), seed=seed, n=n)
    alone = [int(shuffled(np.array([sample]), seed=seed, n=n)[0]) for sample in samples]
    assert together.tolist() == alone
    assert all(0 <= found < n for found in alone)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    n = 500
    orders = {
        tuple(shuffled(np.arange(epoch * n, (epoch + 1) * n), seed=seed, n=n).tolist())
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_order_looks_random() -> None:
    n = 20_000
    order = shuffled(np.arange(n), seed=1, n=n)
    # A random order keeps one thing in place, and one pair of neighbours a side, on average.
    assert (order == np.arange(n)).sum() <= 8
    assert (np.abs(np.diff(order)) == 1).sum() <= 12
    # Correlation of place and thing is 0 ± 1/sqrt(n).
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
    # Where the first thousandth goes: even over ten bins, 2,000 ± 4.5 sigma in each.
    counts = np.histogram(order[: n // 2], bins=10, range=(0, n))[0]
    assert np.all(np.abs(counts - n // 20) < 4.5 * np.sqrt(n / 20))


def test_every_order_of_three_things_occurs() -> None:
    orders = {tuple(shuffled(np.arange(3), seed=seed, n=3).tolist()) for seed in range(200)}
    assert len(orders) == 6


def test_order_is_fixed_for_all_time() -> None:
    # A change would silently give resumed runs other data.
    assert shuffled(np.arange(12), seed=7, n=12).tolist() == [5, 10, 4, 11, 1, 9, 8, 2, 6, 3, 7, 0]
    assert shuffled(np.array([10**12 + 5]), seed=7, n=999_983).tolist() == [310170]
    assert int(keyed(0, np.array([0]))[0]) == 0x48218226FF3CD4BF


def test_mix_is_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0, as the reference implementation prints them.
    stride = 0x9E3779B97F4A7C15
    states = np.array([stride * step % 2**64 for step in (1, 2, 3)], dtype=np.uint64)
    assert mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]

"""A seeded permutation of n numbers, computed where it is needed and never stored.

A Feistel network over the pairs (left, right) of Z_a × Z_b with a·b ≥ n, applied again until the result is below n
(cycle walking): Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002). The round function is the
finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_HALF_ROUNDS = 8


def mix(x: U64) -> U64:
    """The finaliser of splitmix64, a bijection on 64-bit integers; `x` has any shape and is not changed."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed(seed: int, numbers: npt.NDArray[Any]) -> U64:
    """A 64-bit hash of (seed, number) for each number; same shape as `numbers`."""
    start = mix(np.array([(seed + 1) * _GOLDEN & _MASK], dtype=np.uint64))
    return mix(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + start)


def shuffled(samples: npt.NDArray[np.int64], *, seed: int, n: int) -> npt.NDArray[np.int64]:
    """Map samples of an endless stream to numbers below n; every epoch of n samples has its own permutation.

    Args:
        samples: int64 `[k]`, sample numbers from 0; sample g is place g % n of epoch g // n.
        seed: of the order.
        n: at least 1.

    Returns:
        int64 `[k]` in [0, n).
    """
    epochs, places = np.divmod(samples, n)
    left_size = math.isqrt(n - 1) + 1
    right_size = -(-n // left_size)
    keys = keyed(seed, epochs)
    numbers = _network(places.astype(np.uint64), keys, left_size, right_size)
    # At most left_size - 1 of the pairs are not below n, so the loop seldom runs, and on few numbers.
    while (outside := np.flatnonzero(numbers >= n)).size:
        numbers[outside] = _network(numbers[outside], keys[outside], left_size, right_size)
    return numbers.astype(np.int64)


def _network(x: U64, keys: U64, left_size: int, right_size: int) -> U64:
    a, b = np.uint64(left_size), np.uint64(right_size)
    left, right = x // b, x % b
    for number in range(1, _HALF_ROUNDS, 2):
        left = (left + mix(right + keys * np.uint64(number)) % a) % a
        right = (right + mix(left + keys * np.uint64(number + 2 * _HALF_ROUNDS)) % b) % b
    return left * b + right

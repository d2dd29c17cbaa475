"""Keys and values are exchanged: each rank gets those that its rows need, once, and every gradient finds its owner."""

from __future__ import annotations

import pytest

from tests.parallelism.exchanges import check, exchanged
from titanlab.parallelism.exchanges import GatherKv, Ring


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", [Ring, GatherKv])
def test_each_rank_gets_what_it_needs_and_gives_back_what_others_need(pool, ranks, method):
    check(pool.run(ranks, exchanged, method))

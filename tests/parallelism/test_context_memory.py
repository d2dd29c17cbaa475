"""What a rank holds falls with the number of ranks, and no matrix of scores is among it."""

import pytest
from torch import distributed as dist

from benchmarks.context_memory import measure, model_config

SEQ = 2048
RANKS = 4


def figures(method):
    dist.init_process_group("gloo")
    return measure(model_config(dim=64, layers=2), seq=SEQ, batch=1, method=method)


@pytest.mark.parametrize("method", ["ring", pytest.param("all_gather", marks=pytest.mark.full)])
def test_peak_activation_bytes_fall_with_the_degree(pool, method):
    (single,) = pool.run(1, figures, method)
    # One matrix of float32 scores would be more than everything there is.
    assert single["peak_bytes"] < 4 * 4 * SEQ**2
    spread = pool.run(RANKS, figures, method)
    assert sum(each["loss"] for each in spread) == pytest.approx(single["loss"], rel=1e-6)
    for each in spread:
        assert each["peak_bytes"] * RANKS == pytest.approx(single["peak_bytes"], rel=0.15)

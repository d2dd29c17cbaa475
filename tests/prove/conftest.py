"""Traces that the comparisons of this folder share."""

import pytest

from tests import tiny
from tests.prove.parity_rows import traced


@pytest.fixture(scope="session")
def traces(pool, tmp_path_factory):
    """The trace of a recipe by its keys (`tests.tiny.recipe`), as rank 0 has it; one process is trained once."""
    known = {}

    def train(**keys):
        key = repr(sorted(keys.items()))
        if key not in known:
            made = tiny.recipe(tmp_path_factory.mktemp("run"), **keys)
            every = pool.run(made.world, traced, made, tiny.begin(made), limit_seconds=300)
            # What all ranks are told is the same to the last bit.
            assert all(each.losses == every[0].losses and each.grad_norms == every[0].grad_norms for each in every)
            if made.world > 1:
                return every[0]
            known[key] = every[0]
        return known[key]

    return train

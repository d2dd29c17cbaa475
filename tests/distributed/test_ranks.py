"""Which rank an environment names."""

import pytest

from titanlab.distributed import joined
from titanlab.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500",
}  # fmt: skip


def test_torchrun_is_joined_and_round_trips_to_the_variables_torch_reads():
    ranks = joined(TORCHRUN)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (5, 8, 1, 4)
    assert ranks.environment() == TORCHRUN


def test_a_process_on_its_own_joins_nothing():
    assert joined({}) is None


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "8"}, "RANK"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
    ],
)
def test_a_broken_environment_is_named(change, key):
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        joined(environ)
    assert refused.value.key == key

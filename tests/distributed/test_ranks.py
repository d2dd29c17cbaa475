"""Which rank an environment names."""

import pytest

from titanlab.distributed.ranks import joined
from titanlab.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "123",
}


def test_torchrun_is_joined_and_round_trips_to_the_variables_torch_reads():
    ranks = joined(TORCHRUN)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (5, 8, 1, 4)
    assert ranks.environment() == TORCHRUN


def test_a_slurm_step_is_joined():
    ranks = joined(SRUN)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (4, 6, 0, 2)
    assert (ranks.address, ranks.port) == ("gpu03", 20_123)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # the script of sbatch
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_a_process_on_its_own_joins_nothing(environ):
    assert joined(environ) is None


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


@pytest.mark.parametrize(
    ("nodes", "host"), [("n1", "n1"), ("a1,b2", "a1"), ("gpu[03-07,12]", "gpu03"), ("n-[1,3]", "n-1")]
)
def test_the_first_host_of_a_list_is_found(nodes, host):
    assert joined({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == host

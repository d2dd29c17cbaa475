"""Keys of launch=slurm, and what is wrong with a value."""

import math

import pytest

from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm.launcher import SlurmLauncher


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"minutes": 0}, "launch.minutes=0: must be at least 1; try 60, or null"),
        ({"signal_seconds": 0}, "launch.signal_seconds=0: must be at least 1; try 120$"),
        ({"minutes": 2}, "launch.signal_seconds=120: leaves nothing of the 2 minutes that a job has; try 20"),
        ({"memory_gib": -1.0}, "launch.memory_gib=-1.0: must not be negative"),
        ({"max_requeues": -1}, "launch.max_requeues=-1: must not be negative"),
        ({"partition": " "}, "launch.partition= *: must be a name"),
        ({"environment": {"A-B": "1"}}, "launch.environment=A-B: is no name of a variable"),
        ({"extra": {"--x": 1}}, "launch.extra=--x: is no flag of sbatch; write it long, without the dashes"),
        ({"extra": {"ntasks_per_node": 1}}, "launch.extra.ntasks_per_node=1: is titanlab's own"),
        ({"extra": {"job-name": "x"}}, "launch.extra.job-name=x: is titanlab's own"),
        ({"extra": {"time=5 --wrap": "x"}}, "launch.extra=time=5 --wrap: is no flag of sbatch"),
        ({"extra": {"exclusive": "yes"}}, "launch.extra.exclusive=yes: is text, and .* takes none; try true"),
        ({"extra": {"use_min_nodes": "Off"}}, "launch.extra.use_min_nodes=Off: is text, and this flag .*; try false"),
        ({"extra": {"": "x"}}, "launch.extra=: is no flag of sbatch"),
        ({"cpus_per_task": -1}, "launch.cpus_per_task=-1: must be at least 1; try 8, or null"),
        ({"array_parallelism": 0}, "launch.array_parallelism=0: must be at least 1; try 8, or null"),
        ({"threads": 0}, "launch.threads=0: must be at least 1; try 1, or null"),
        ({"memory_gib": math.nan}, "launch.memory_gib=nan: must not be negative"),
        ({"account": "a\n#SBATCH --wrap=x"}, "launch.account=.*: must be a name; name one, or null"),
        ({"python": ""}, "launch.python=: must be a name"),
        ({"environment": {"1A": "1"}}, "launch.environment=1A: is no name of a variable"),
        ({"environment": {"A;x": "1"}}, "launch.environment=A;x: is no name of a variable"),
        ({"environment": {"": "1"}}, "launch.environment=: is no name of a variable"),
        ({"restarts": -1}, "launch.restarts=-1: must not be negative"),
        ({"min_world": 2}, "launch.min_world=2: says how small a restarted run may become, and launch.restarts=0"),
        ({"min_world": 0, "restarts": 1}, "launch.min_world=0: must be at least 1"),
    ],
)
def test_keys_of_slurm(given, told):
    with pytest.raises(ConfigError, match=told):
        Slurm(**given)


def test_the_smallest_values_are_accepted():
    ones = dict.fromkeys(("cpus_per_task", "minutes", "array_parallelism", "threads", "signal_seconds"), 1)
    least = Slurm(memory_gib=0, max_requeues=0, restarts=1, min_world=1, environment={"_": ""}, **ones)
    assert (least.minutes, least.memory_gib, least.environment) == (1, 0, {"_": ""})


def test_the_warning_may_take_all_but_a_second_of_the_time():
    assert Slurm(minutes=2, signal_seconds=119).signal_seconds == 119


def test_it_is_called_slurm_and_its_launcher_is_slurms():
    assert Slurm().title == "Slurm"
    assert isinstance(Slurm().implementation(), SlurmLauncher)

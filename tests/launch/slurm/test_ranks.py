"""Which rank a task of srun is."""

import pytest

from titanlab.errors import ConfigError
from titanlab.launch import joined
from titanlab.launch.slurm import launcher as ranks_module
from titanlab.launch.slurm.command import hosts
from titanlab.launch.slurm.launcher import slurm_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
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


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setattr(ranks_module.socket, "getaddrinfo", lambda name, port: [])


def test_a_slurm_step_is_joined():
    ranks = slurm_ranks(SRUN)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (4, 6, 0, 2)
    assert (ranks.address, ranks.port) == ("gpu03", 20_000 + 97 * 123)


def test_each_step_of_a_job_has_a_port_of_its_own():
    def port(job, step, **more):
        return joined({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), **more}).port

    ports = [port(job, step) for job in (4_000_123, 4_000_124) for step in range(97)]
    assert len(set(ports)) == len(ports)
    assert len({port(job, 0) for job in range(9_000, 9_000 + 12_768)}) == 12_768
    # Linux gives ports from 32,768 on to outgoing connections.
    assert all(20_000 <= value < 32_768 for value in ports)
    assert port(1, 1, MASTER_PORT="29500") == 29_500


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


SHELL = {**SRUN, "SLURM_PTY_PORT": "4711", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "6"}


def test_a_command_in_the_shell_of_a_step_starts_its_ranks_here(monkeypatch):
    """`srun --ntasks=6 --pty bash`: nobody else comes, and rank 0 waited for ten minutes."""
    monkeypatch.setattr("os.getpgrp", lambda: 20)
    monkeypatch.setattr("os.getsid", lambda pid: 10)
    assert joined(SHELL) is None
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS=6: is a shell on one of several nodes"):
        joined({**SHELL, "SLURM_STEP_TASKS_PER_NODE": "4,2"})
    # Tasks without a terminal, and steps without a shell.
    assert joined({**SHELL, "SLURM_PROCID": "1"}).world == 6
    assert joined({**SRUN, "SLURM_PROCID": "0"}).world == 6
    monkeypatch.setattr("os.getsid", lambda pid: 20)
    assert joined(SHELL).world == 6


def test_ranks_of_several_nodes_meet_at_an_address_that_resolves(monkeypatch):
    known = {"gpu03"}

    def resolve(name, port):
        if name not in known:
            raise OSError("Name or service not known")

    monkeypatch.setattr(ranks_module.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(ranks_module, "node_address", lambda node: {"gpu03": "10.0.0.3"}.get(node))
    assert joined(SRUN).address == "gpu03"
    known.clear()
    assert joined(SRUN).address == "10.0.0.3"
    # Slurm does not know either.
    assert joined({**SRUN, "SLURM_STEP_NODELIST": "n[1-2]"}).address == "n1"
    assert joined({**SRUN, "MASTER_ADDR": "head"}).address == "head"
    # On one node nobody asks.
    alone = {**SRUN, "SLURM_STEP_NODELIST": "gpu03", "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"}
    assert joined(alone).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu-[001-003,007]", "gpu-001 gpu-002 gpu-003 gpu-007"),
        ("rack[1-2]n[09-10],login", "rack1n09 rack1n10 rack2n09 rack2n10 login"),
        ("a[1,3]-ib,b", "a1-ib a3-ib b"),
        ("", ""),
    ],
)
def test_a_list_of_hosts_is_written_out(nodes, names):
    assert hosts(nodes) == names.split()


@pytest.mark.parametrize(("tasks", "node", "count"), [("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("1,2(x3)", 0, 1)])
def test_nodes_may_have_unequally_many_tasks(tasks, node, count):
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert slurm_ranks(environ).local_world == count


def test_torchrun_comes_before_the_step_that_it_was_started_in():
    assert joined({**SRUN, **TORCHRUN}).started_by == "torchrun"
    assert joined(SRUN).started_by == "slurm"


@pytest.mark.parametrize(
    ("environ", "gpus", "own"),
    [
        # srun --gpus-per-task=1, and its control group: each task sees a GPU that CUDA calls 0.
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 1, True),
        ({"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1", "CUDA_VISIBLE_DEVICES": "0"}, 1, True),
        ({"SLURM_GPU_BIND": "single:1", "CUDA_VISIBLE_DEVICES": "2"}, 1, True),
        # CUDA_VISIBLE_DEVICES is of the site's making.
        ({"CUDA_VISIBLE_DEVICES": "0"}, 4, True),
        # Several tasks on a node with one GPU; tasks that see all GPUs of theirs; a shell of `srun --pty`.
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, False),
        ({}, 4, False),
        (
            {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            4,
            False,
        ),
    ],
)
def test_a_task_may_have_a_gpu_of_its_own(monkeypatch, environ, gpus, own):
    monkeypatch.setattr(ranks_module, "gpus", lambda: gpus)
    ranks = slurm_ranks({**SRUN, **environ})
    assert ranks.has_own_gpu is own
    # The rank's own process reads it again, with the variables of torch.
    worker = joined(ranks.environment())
    assert (worker.has_own_gpu, worker.rank, worker.local_rank) == (own, ranks.rank, ranks.local_rank)

"""The pool of workers that tests of several ranks share."""

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.pool import RankFailure


def named_rank(prefix):
    return prefix + os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"]


def sum_of_ranks():
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def gathered_square(shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    whole = torch.arange(8.0)
    sharded = distribute_tensor(whole, mesh, [Shard(0)] + [Replicate()] * (len(shape) - 1))
    return (sharded * sharded).full_tensor().sum().item()


def rank_one_raises():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise LookupError("a message to find")
    dist.all_reduce(torch.ones(1))


def rank_zero_hangs():
    if os.environ["RANK"] == "0":
        time.sleep(600)


def rank_one_dies():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def warn():
    warnings.warn("a deprecated thing", DeprecationWarning, stacklevel=1)


def test_results_come_by_rank_and_what_cannot_be_called_is_refused(pool):
    assert pool.run(3, named_rank, "rank ") == ["rank 0/3", "rank 1/3", "rank 2/3"]
    with pytest.raises(ValueError, match="workers cannot import"):
        pool.run(1, lambda: 1)
    with pytest.raises(ValueError, match=f"the pool has {pool.size} workers, not {pool.size + 1}"):
        pool.run(pool.size + 1, sum_of_ranks)


def test_meshes_of_calls_do_not_know_each_other(pool):
    for shape, names in [((2,), ("shard",)), ((2, 2), ("replicate", "shard")), ((4,), ("shard",)), ((2,), ("shard",))]:
        world = torch.Size(shape).numel()
        assert pool.run(world, gathered_square, shape, names) == [140.0] * world


def test_an_exception_comes_with_its_rank_and_traceback_and_the_pool_goes_on(pool):
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)\Arank 1 of 2: Traceback.*in rank_one_raises.*a message to find"):
        pool.run(2, rank_one_raises)
    assert time.monotonic() - begin < 60
    assert pool.run(2, sum_of_ranks) == [1.0] * 2


def test_a_hang_is_ended_by_the_limit_and_shown(pool):
    with pytest.raises(RankFailure, match=r"(?s)\Arank 0 of 2 did not return within 1 s.*in rank_zero_hangs"):
        pool.run(2, rank_zero_hangs, limit_seconds=1)
    assert pool.run(2, named_rank, "") == ["0/2", "1/2"]


def test_a_death_is_noticed(pool):
    with pytest.raises(RankFailure, match="rank 1 of 2: the process ended with exit code 7"):
        pool.run(2, rank_one_dies)
    assert pool.run(2, sum_of_ranks) == [1.0] * 2


def leave_traces():
    os.environ["A_TRACE"] = "1"
    torch.set_default_dtype(torch.float64)
    os.chdir("/")
    raise SystemExit(3)


def traces():
    return os.environ.get("A_TRACE"), os.environ.get("RANK"), str(torch.get_default_dtype()), Path.cwd() == Path("/")


def test_a_call_leaves_no_traces_and_an_exit_or_a_warning_is_a_failure(pool):
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        pool.run(1, leave_traces)
    with pytest.raises(RankFailure, match="DeprecationWarning: a deprecated thing"):
        pool.run(1, warn)
    assert pool.run(1, traces) == [(None, "0", "torch.float32", False)]


def variable(name):
    return os.environ.get(name)


def test_a_worker_that_starts_during_a_test_does_not_get_the_variables_of_the_test(pool, monkeypatch):
    monkeypatch.setenv("TITANLAB_OF_A_TEST", "1")
    pool._drop(0)
    assert pool.run(1, variable, "TITANLAB_OF_A_TEST") == [None]

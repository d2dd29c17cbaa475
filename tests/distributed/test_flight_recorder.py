"""What is read of torch's recorder, and what a rank knows of its groups."""

import functools
import json
import threading
import time

import pytest
import torch.distributed as dist

from titanlab.costs import Layout
from titanlab.distributed import build_mesh, topology, traffic
from titanlab.distributed.traffic import last_collectives
from titanlab.records import Collective


def entry(sequence, **changes):
    """As torch 2.13 dumps it for gloo."""
    return {
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": ["1", "mesh_shard"],
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "time_created_ns": 1_000_000_000 + sequence,
        **changes,
    }


@pytest.fixture
def dumps(monkeypatch):
    def set_to(*entries):
        found = tuple(functools.partial(lambda own: json.dumps({"entries": own}).encode(), own) for own in entries)
        monkeypatch.setattr(traffic, "_DUMPS", (*found, None))

    return set_to


def test_collectives_of_gloo_and_of_nccl(dumps):
    nccl = entry(2, profiling_name="nccl:all_gather", state="started", retired=False, time_created_ns=1)
    message = entry(0, is_p2p=True, p2p_seq_id=5, profiling_name="nccl:recv 0<-1", state="completed", retired=False)
    dumps([entry(1), entry(2, retired=False)], [nccl, message])
    found = [(each.operation, each.sequence, each.is_message, each.is_done) for each in last_collectives()]
    assert found == [
        ("all_gather", 2, False, False),
        ("recv 0<-1", 5, True, True),
        ("all_reduce", 1, False, True),
        ("all_reduce", 2, False, False),
    ]
    last = Collective("1", 2, "all_reduce", ((8,),), ("Float",), is_message=False, is_done=False, created=1.000000002)
    assert last_collectives()[-1] == last


def test_a_recorder_in_two_dumps_is_counted_once_and_the_last_are_kept(dumps):
    every = [entry(number) for number in range(10)]
    dumps(every, every)
    assert [each.sequence for each in last_collectives(4)] == [6, 7, 8, 9]


def test_a_recorder_that_does_not_answer_or_says_nonsense_is_passed_over(dumps, monkeypatch):
    monkeypatch.setattr(traffic, "_DUMP_SECONDS", 0.05)
    dumps([])
    assert last_collectives() == []
    release = threading.Event()
    monkeypatch.setattr(traffic, "_DUMPS", (lambda: release.wait(120) and b"{}",))
    begin = time.monotonic()
    assert last_collectives() == []
    assert time.monotonic() - begin < 60
    release.set()


def names_of_groups():
    dist.init_process_group("gloo")
    mesh = build_mesh(Layout(shard=2, tensor=2), "cpu")
    found = topology(mesh)()
    assert found["messages"] is None
    return found["coordinates"], sorted((group.axis, group.ranks) for group in found["groups"].values())


def test_groups_and_coordinates_of_a_mesh(pool):
    coordinates, groups = pool.run(4, names_of_groups)[2]
    assert coordinates == {"shard": 1, "tensor": 0}
    assert groups == [("shard", (0, 2)), ("tensor", (2, 3)), ("world", (0, 1, 2, 3))]

"""The tracer sees what ranks send, whoever issues it, and changes nothing."""

import functools
import json
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlab.costs import Layout
from titanlab.distributed import build_mesh, topology, traced, traffic
from titanlab.distributed.traffic import last_collectives
from titanlab.parallelism.collectives import all_gather_single, reduce_scatter_single
from titanlab.records import CodeLine, Collective

# Torch names them otherwise from version to version: our rows must not.
EVERY = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_gather": lambda x: all_gather_single(x.new_empty(2 * len(x)), x),
    "all_gather of a list": lambda x: dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x),
    "reduce_scatter": lambda x: reduce_scatter_single(x.new_empty(len(x) // 2), x),
    "reduce_scatter of a list": lambda x: dist.reduce_scatter(x.new_empty(len(x) // 2), list(x.chunk(2))),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "uneven all_to_all": lambda x: dist.all_to_all_single(
        x.new_empty(2 * (1 + 2 * dist.get_rank())), x[:4], [1 + 2 * dist.get_rank()] * 2, [1, 3]
    ),
    "broadcast": lambda x: dist.broadcast(x, src=0),
    "reduce": lambda x: dist.reduce(x, dst=0),
    "gather": lambda x: dist.gather(x, [torch.empty_like(x)] * 2 if dist.get_rank() == 0 else None),
    "barrier": lambda x: dist.barrier(),
    "messages": lambda x: passed_on(x),
}
# One operation of 8 numbers, float32, on rank 0 of 2: kind → count, bytes, wire bytes.
EXPECTED = {
    "all_reduce": {"all_reduce": (1, 32, 32)},
    "all_gather": {"all_gather": (1, 64, 32)},
    "all_gather of a list": {"all_gather": (1, 64, 32)},
    "reduce_scatter": {"reduce_scatter": (1, 32, 16)},
    "reduce_scatter of a list": {"reduce_scatter": (1, 32, 16)},
    "all_to_all": {"all_to_all": (1, 32, 16)},
    "uneven all_to_all": {"all_to_all": (1, 16, 12)},
    "broadcast": {"broadcast": (1, 32, 32)},
    "reduce": {"reduce": (1, 32, 32)},
    "gather": {"gather": (1, 64, 64)},
    "barrier": {"barrier": (1, 0, 0)},
    "messages": {"recv": (1, 32, 0), "send": (1, 32, 32)},
}


def table(traffic, axis="world"):
    rows = traffic.rows()
    assert {row.axis for row in rows} <= {axis}
    return {row.kind: (row.count, row.bytes, row.wire_bytes) for row in rows}


def passed_on(x):
    """The other rank's x."""
    theirs, other = torch.empty_like(x), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, x.contiguous(), other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def world_of_two():
    dist.init_process_group("gloo")
    return {dist.group.WORLD.group_name: "world"}


def of_every_operation():
    axes, found = world_of_two(), {}
    for name, operation in EVERY.items():
        with traced(axes) as traffic:
            operation(torch.ones(8))
        found[name] = table(traffic)
    return found


def test_every_operation_has_its_kind_and_bytes(pool):
    assert pool.run(2, of_every_operation)[0] == EXPECTED


def of_others():
    """What is issued by hooks, in backward, in C++, in operators and by DTensor."""
    axes, found = world_of_two(), {}
    torch.manual_seed(0)

    @torch.library.custom_op("traffic_test::swap", mutates_args=())
    def swap(x: torch.Tensor) -> torch.Tensor:
        return passed_on(x)

    swap.register_fake(torch.empty_like)
    swap.register_autograd(lambda ctx, gradient: swap(gradient))
    x = torch.randn(8, requires_grad=True)
    with traced(axes) as traffic:
        swap(x).sum().backward()
    found["operator"] = table(traffic)
    compiled = torch.compile(lambda x: swap(x * 2).cos(), backend="aot_eager", fullgraph=True)
    for name in ("compiled first", "compiled later"):
        with traced(axes) as traffic:
            compiled(x).sum().backward()
        found[name] = table(traffic)
    with traced(axes) as traffic:
        Summed.apply(x).sum().backward()
    found["backward"] = table(traffic)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    with traced(axes) as traffic:
        model(torch.ones(1, 8)).sum().backward()
    found["reducer"] = table(traffic)
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    with traced(axes) as traffic:
        assert isinstance(cut, DTensor)
        cut.redistribute(placements=[Replicate()]).to_local().sum().item()
    found["DTensor"] = table(traffic)
    return found


def test_whoever_sends_is_seen(pool):
    both_ways = {"recv": (2, 64, 0), "send": (2, 64, 64)}
    assert pool.run(2, of_others)[0] == {
        "operator": both_ways,
        "compiled first": both_ways,
        "compiled later": both_ways,
        "backward": {"all_reduce": (1, 32, 32)},
        "reducer": {"all_reduce": (1, 36, 36)},
        "DTensor": {"all_gather": (1, 32, 16)},
    }


def untraced():
    axes = world_of_two()
    with traced(axes) as traffic:
        pass
    dist.all_reduce(torch.ones(8))
    with traced({}) as unknown:
        dist.all_reduce(torch.ones(8))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with traced(axes) as single:
        dist.all_reduce(torch.ones(8), group=alone)
    with pytest.raises(ZeroDivisionError), traced(axes):
        raise ZeroDivisionError
    dist.all_reduce(torch.ones(8))
    return table(traffic), table(unknown, "other"), table(single)


def test_nothing_else_is_counted(pool):
    assert pool.run(2, untraced)[0] == ({}, {"all_reduce": (1, 32, 32)}, {})


# What is read of torch's recorder


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


def recorded():
    """Two collectives, the second on the line after the first; then the lines that the recorder has of them."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(2), 0)
    quick = [each.source for each in last_collectives()]
    return [(each.operation, each.source) for each in last_collectives(with_lines=True)][-2:], set(quick)


def test_each_collective_has_the_line_that_called_it(pool):
    (first, second), quick = pool.run(2, recorded)[1]
    line = recorded.__code__.co_firstlineno + 3
    assert first == ("all_reduce", CodeLine(__file__, line, "recorded"))
    assert second == ("broadcast", CodeLine(__file__, line + 1, "recorded"))
    assert quick == {None}


def test_times_of_the_device_and_a_dump_that_names_a_class(monkeypatch):
    times = {"time_discovered_started_ns": 3_000_000_000, "time_discovered_completed_ns": 5_000_000_000}
    frames = [{"filename": "/x/torch/distributed/c10d.py", "line": 3, "name": "all_reduce"}]
    frames.append({"filename": "/home/me/loss.py", "line": 12, "name": "mean"})
    entries = [entry(1, frames=frames, **times), entry(2, time_discovered_started_ns=None)]
    dumped = pickle.dumps({"entries": entries})
    monkeypatch.setattr(traffic, "_DUMPS_WITH_LINES", (lambda: dumped, lambda: pickle.dumps(Path)))
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    first, second = last_collectives(with_lines=True)
    assert (first.started, first.ended, second.started) == (3.0, 5.0, 0.0)
    assert (first.source, second.source) == (CodeLine("/home/me/loss.py", 12, "mean"), None)


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

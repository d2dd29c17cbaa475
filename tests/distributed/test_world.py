"""A world of one host: nothing of it can be reached from another host."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titanlab.distributed import ALONE, StoppedEarly, free_port, joined, open_world, stop_request
from titanlab.distributed.world import AbsentRanks, _select_device, _Wait
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, from_exception

LISTENS = "0A"


def listening():
    """Addresses, in hexadecimal digits as the kernel writes them, at which this process listens."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(descriptor))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def is_loopback_row(row):
    address = row.partition(":")[0]
    # 127.x.x.x, ::1 and ::ffff:127.x.x.x, each word of 32 bits in the order of this host.
    return ((len(address) == 8 or address.startswith("0" * 16 + "FFFF0000")) and address.endswith("7F")) or (
        address == "0" * 24 + "01000000"
    )


def opened(environ):
    """What a rank listens at that it has not listened at before, as a world with groups of its own is open."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(environ)
    before = listening()
    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        group = dist.new_group(backend="gloo")
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        assert total.item() == world.world
        assert world.gather(world.rank) == list(range(world.world))
        return sorted(listening() - before)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux only")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_of_one_host_listen_at_the_loopback_alone(pool, address):
    for rows in pool.run(2, opened, {"MASTER_ADDR": address}):
        assert rows
        assert all(map(is_loopback_row, rows)), rows


def alone():
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    before = listening()
    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False):
        return sorted(listening() - before)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux only")
def test_a_process_on_its_own_is_not_reachable_either(pool):
    assert all(map(is_loopback_row, pool.run(1, alone)[0]))


def test_a_persons_interface_is_kept(pool):
    assert pool.run(1, said_of_interface, "eth7") == ["Unable to find address for: eth7"]


def said_of_interface(name):
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False):
            return "found"
    except RuntimeError as error:
        return str(error).rpartition(". ")[2]
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
        # torch has counted the group that it could not make: the next one would have another name than the other ranks'.
        dist.distributed_c10d._world.group_count = 0


def test_the_only_gpu_that_a_process_sees_may_be_its_own(monkeypatch):
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    fourth = replace(ALONE, rank=3, local_rank=3, world=4, local_world=4)
    with pytest.raises(ConfigError, match="world=4: more processes on this host than its 1 GPUs"):
        _select_device("cuda", fourth)
    assert _select_device("cuda", replace(fourth, has_own_gpu=True)) == torch.device("cuda", 0)


def alone_of(world, rank, port, *, waits=print):
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return open_world(joined(environ), accelerator="cpu", seed=0, deterministic=False, waits=waits)


@pytest.mark.parametrize(("world", "rank", "absent"), [(2, 0, "rank 1"), (4, 0, "ranks 1, 2, 3"), (3, 1, "rank 0")])
def test_ranks_that_do_not_come_are_named(monkeypatch, world, rank, absent):
    monkeypatch.setattr("titanlab.distributed.world._JOIN_SECONDS", 1.0)
    monkeypatch.setattr("titanlab.distributed.world._TOLD_SECONDS", 0.05)
    told, port = [], free_port()
    with pytest.raises(AbsentRanks) as raised, alone_of(world, rank, port, waits=told.append):
        pass
    # What is told does not change, so it is told once.
    assert told == [f"rendezvous of {world} ranks, waiting for {absent}"]
    assert str(raised.value) == (
        f"{absent} did not come to the rendezvous of {world} ranks at 127.0.0.1:{port} within 1 s"
    )
    note = from_exception(raised.value, rank=rank)
    assert (note.kind, note.echo, note.traceback) == (OutcomeKind.HANG, False, None)


@pytest.mark.parametrize("world", [2, 100, 512])
def test_many_ranks_do_not_look_too_often(monkeypatch, world):
    pauses, now = [], [0.0]
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    wait = _Wait(replace(ALONE, world=world), print)
    for now[0] in (0.0, 0.3, 4.0, 30.0, 300.0):
        wait.pause()
    assert all(world / 100 <= pause <= 6 for pause in pauses)
    assert pauses[-1] == max(1.0, world / 100)


@pytest.mark.parametrize(("rank", "absent"), [(0, "rank 1"), (1, "rank 0")])
def test_a_stop_signal_ends_the_rendezvous(monkeypatch, rank, absent):
    """Three of Ctrl-C and a SIGTERM were ignored for ten minutes: torch waits in native code."""
    monkeypatch.setattr("titanlab.distributed.world._TOLD_SECONDS", 0.05)
    timers = []

    def stopped(_):
        # It waits by now, and the signal comes in the middle of it.
        timers.append(threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    with pytest.raises(StoppedEarly, match=f"^while it waited for {absent}$"), stop_request() as request:
        with request.at_once(active=True, patience_seconds=0.1), alone_of(2, rank, free_port(), waits=stopped):
            pass
    for timer in timers:
        timer.join()

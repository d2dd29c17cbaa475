"""A process's place in a job, and where its ranks meet."""

import socket

import pytest

from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch import group as rendezvous
from titanlab.launch import launcher_named
from titanlab.launch.group import Rendezvous, await_meeting, find_meeting, publish_meeting
from titanlab.launch.job import address_of, port_of
from titanlab.launch.slurm import launcher as slurm_launcher
from titanlab.launch.slurm.command import hosts
from titanlab.records import RunFolder

SLURM, HERE = launcher_named("slurm"), launcher_named("local")
TASK = {
    "SLURM_JOB_ID": "14",
    "SLURM_ARRAY_JOB_ID": "12",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[3-4]",
}


def test_a_task_of_an_array():
    found = SLURM.place_in(TASK)
    assert (found.launcher, found.job_id, found.raw_job_id, found.index, found.restart) == ("slurm", "12_2", "14", 2, 1)
    assert (found.ranks.rank, found.ranks.world, found.ranks.local_rank, found.ranks.local_world) == (3, 4, 1, 2)
    assert found.nodes == ("n3", "n4")
    # Another start of the same job meets elsewhere.
    assert found.start != SLURM.place_in({**TASK, "SLURM_RESTART_COUNT": "2"}).start


def test_alone():
    # Also inside another job.
    found = HERE.place_in(TASK)
    assert (found.launcher, found.index, found.nodes, found.ranks.world) == ("local", None, (socket.gethostname(),), 1)


def test_the_address_is_the_given_one_or_a_name_that_resolves_or_slurms_own(monkeypatch):
    job = SLURM.place_in(TASK)
    assert address_of(SLURM, job, {"MASTER_ADDR": "given"}) == "given"
    assert address_of(HERE, HERE.place_in({}), {}) == "127.0.0.1"
    assert address_of(SLURM, SLURM.place_in({**TASK, "SLURM_STEP_NODELIST": "n3"}), {}) == "127.0.0.1"
    monkeypatch.setattr(slurm_launcher, "node_address", lambda node: {"n3": "10.0.0.3"}.get(node))
    known = {"10.0.0.3", "n4"}

    def resolve(name, port):
        if name not in known:
            raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert address_of(SLURM, job, {}) == "10.0.0.3"
    assert address_of(SLURM, job, {"SLURMD_NODENAME": "n4"}) == "n4"
    known.clear()
    with pytest.raises(ConfigError, match="has no address"):
        address_of(SLURM, job, {})


def test_a_port_is_free_or_given():
    assert port_of({"MASTER_PORT": "29500"}) == 29500
    with socket.socket() as probe:
        probe.bind(("", port_of({})))
    with pytest.raises(ConfigError, match="is no port"):
        port_of({"MASTER_PORT": "70000"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("a1,b2", "a1 b2"),
        ("gpu[03-04,12],n1", "gpu03 gpu04 gpu12 n1"),
        ("r1-n[1-2]-x,q", "r1-n1-x r1-n2-x q"),
        ("", ""),
    ],
)
def test_hosts(text, names):
    assert hosts(text) == names.split()


def test_the_others_find_the_attempt_of_their_own_start(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    for attempt, start in ((1, "first"), (2, "second")):
        run.attempt_folder(attempt).mkdir(parents=True)
        publish_meeting(run, Rendezvous(start=start, attempt=attempt, address="n1", port=1000 + attempt))
    assert await_meeting(run, "second").port == 1002
    assert find_meeting(run, "first").attempt == 1
    assert find_meeting(run, "third") is None
    monkeypatch.setattr(rendezvous, "look_seconds", lambda world, is_first: 0.01)
    with pytest.raises(TitanlabError, match="has begun no attempt"):
        await_meeting(run, "third", seconds=0.05)
    publish_meeting(run, Rendezvous(start="third", reason="is in other hands"))
    assert await_meeting(run, "third").reason == "is in other hands"

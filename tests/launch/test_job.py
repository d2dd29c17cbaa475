"""One process of a job before it trains: its name, recipe and place, its claim, and how it finds the others."""

import json
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.launch.slurm.printed import submission
from titanlab.distributed import ALONE
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch import job as rendezvous
from titanlab.launch import launcher_named
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.job import (
    MEETING_FILE,
    Job,
    Rendezvous,
    address_of,
    await_meeting,
    find_meeting,
    port_of,
    publish_meeting,
)
from titanlab.launch.slurm import launcher as slurm_launcher
from titanlab.launch.watch import say
from titanlab.records import RunFolder


def job_of(run, *, launcher="slurm", restart=0, rank=0, **given):
    ranks = tiny.replace(ALONE, rank=rank, world=4)
    place = ProcessPlace(
        launcher=launcher, job_id="12_1", raw_job_id="14", restart=restart, ranks=ranks, nodes=("n1", "n2")
    )
    return Job(run=run, place=place, submission=submission(), index=1, **given)


@pytest.mark.parametrize(
    ("launcher", "times", "hurried"),
    [
        ("local", [], False),
        ("local", [5.0], False),
        # One request that comes by two ways.
        ("local", [5.0, 5.9], False),
        ("local", [5.0, 6.5], True),
        ("local", [5.0, 5.1, 9.0], True),
        # Slurm repeats its signals.
        ("slurm", [5.0, 9.0], False),
    ],
)
def test_who_signals_twice_does_not_want_to_wait(run, launcher, times, hurried):
    signals = [(signal.SIGTERM, when) for when in times]
    assert job_of(run, launcher=launcher, signals=signals).is_hurried is hurried


def test_a_log_that_is_closed_stops_nothing(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert say("a line") is None


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path / "runs", steps=3))


MEETING = Rendezvous(start="7/a", attempt=1, address="10.0.0.1", port=29500, members=(0, 2, 3))


def test_what_rank_0_publishes_is_found(run):
    assert find_meeting(run, "7/a") is None
    publish_meeting(run, MEETING)
    assert find_meeting(run, "7/a") == MEETING == await_meeting(run, "7/a", seconds=0)
    # A job that was requeued finds the file of its first start.
    assert find_meeting(run, "7/b") is None
    assert json.loads((run.attempt_folder(1) / MEETING_FILE).read_text())["schema"] == 1
    # Two jobs of one run: the second begins while ranks of the first still poll.
    run.begin_attempt(run.config(), {})
    assert find_meeting(run, "7/a") == MEETING


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"start": "7/a", "members": 5}', "\0", '"7/a"'])
def test_a_damaged_file_is_none(run, content):
    (run.attempt_folder(1) / MEETING_FILE).write_text(content)
    assert find_meeting(run, "7/a") is None
    publish_meeting(run, MEETING)
    assert find_meeting(run, "7/a") == MEETING


@pytest.mark.parametrize(
    ("ranks", "least", "most"),
    [
        (replace(ALONE, world=2, rank=1, local_rank=1), 130, 150),
        # 512 ranks on 64 nodes: 64 × 140 and 448 × 67 looks in ten minutes, 65 a second. At 5 looks a second of each
        # rank there would be 2,560.
        (replace(ALONE, world=512, rank=8), 130, 170),
        (replace(ALONE, world=512, rank=1, local_rank=1), 60, 70),
    ],
)
def test_a_rank_that_waits_looks_ever_less_often(tmp_path, monkeypatch, ranks, least, most):
    now, looks = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "find_meeting", lambda run, start: looks.append(now[0]))
    with pytest.raises(TitanlabError, match="within 600 s"):
        rendezvous.await_meeting(RunFolder(tmp_path), "start", ranks=ranks)
    assert least <= len(looks) <= most
    # A rendezvous within a second is found at once by a job of this size.
    assert looks[1] < 0.2 + 0.004 * 4 * ranks.world + 1


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
    with pytest.raises(ConfigError, match="is not a port"):
        port_of({"MASTER_PORT": "70000"})

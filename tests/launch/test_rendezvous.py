"""How ranks find the attempt that rank 0 has begun, by files alone."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.weights.saved import run_of
from titanlab.distributed import ALONE
from titanlab.errors import TitanlabError
from titanlab.launch import group as rendezvous
from titanlab.launch.group import MEETING_FILE, Rendezvous, await_meeting, find_meeting, publish_meeting
from titanlab.records import RunFolder


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path)[1]


MEETING = Rendezvous(start="7/a", attempt=1, address="10.0.0.1", port=29500, members=(0, 2, 3))


def test_what_rank_0_publishes_is_found(run):
    assert find_meeting(run, "7/a") is None
    publish_meeting(run, MEETING)
    assert find_meeting(run, "7/a") == MEETING
    assert (run.attempt_folder(1) / MEETING_FILE).is_file()


def test_the_rendezvous_of_another_start_is_none(run):
    """A job that was requeued finds the file of its first start."""
    publish_meeting(run, MEETING)
    assert find_meeting(run, "7/b") is None


def test_without_an_attempt_it_is_in_the_run_s_folder_and_has_a_reason(run):
    publish_meeting(run, Rendezvous(start="7/b", reason="done already"))
    found = find_meeting(run, "7/b")
    assert (found.attempt, found.reason, found.members) == (0, "done already", ())
    assert (run.path / MEETING_FILE).is_file()
    publish_meeting(run, Rendezvous(start="7/c", reason="next"))
    assert find_meeting(run, "7/b") is None


def test_a_later_attempt_does_not_hide_the_one_before_it(run):
    """Two jobs of one run: the second begins while ranks of the first still poll."""
    publish_meeting(run, MEETING)
    run.begin_attempt(run.config(), {})
    assert find_meeting(run, "7/a") == MEETING


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"start": "7/a", "members": 5}', "\0", '"7/a"'])
def test_a_damaged_file_is_none(run, content):
    (run.attempt_folder(1) / MEETING_FILE).write_text(content)
    assert find_meeting(run, "7/a") is None
    publish_meeting(run, MEETING)
    assert find_meeting(run, "7/a") == MEETING


def test_a_pipe_in_place_of_the_file_is_none(run):
    os.mkfifo(run.attempt_folder(1) / MEETING_FILE)
    assert find_meeting(run, "7/a") is None


def test_a_rank_waits_until_rank_0_has_published(run, monkeypatch):
    monkeypatch.setattr(rendezvous, "look_seconds", lambda world, is_first: 0.001)
    timer = threading.Timer(0.02, publish_meeting, (run, MEETING))
    timer.start()
    assert await_meeting(run, "7/a", seconds=30) == MEETING
    timer.join()


def test_a_rank_does_not_wait_for_ever(run, monkeypatch):
    monkeypatch.setattr(rendezvous, "look_seconds", lambda world, is_first: 0.001)
    begin = time.monotonic()
    with pytest.raises(TitanlabError) as caught:
        await_meeting(run, "7/a", seconds=0.01)
    assert time.monotonic() - begin < 10
    where = run.path / "attempts"
    assert str(caught.value) == f"rank 0 of this job has begun no attempt in {where} within 0.01 s; see its log"


def test_a_rendezvous_that_is_there_needs_no_time(run):
    publish_meeting(run, MEETING)
    assert await_meeting(run, "7/a", seconds=0) == MEETING


def test_the_file_names_its_version(run):
    publish_meeting(run, MEETING)
    assert json.loads((run.attempt_folder(1) / MEETING_FILE).read_text())["schema"] == 1


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

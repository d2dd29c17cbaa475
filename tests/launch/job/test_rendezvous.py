"""How ranks find the attempt that rank 0 has begun, by files alone."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from tests.weights.saved import run_of
from titanlab.errors import TitanlabError
from titanlab.launch.job import rendezvous
from titanlab.launch.job.rendezvous import FILE, Rendezvous, find, publish, wait


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path)[1]


MEETING = Rendezvous(start="7/a", attempt=1, address="10.0.0.1", port=29500, members=(0, 2, 3))


def test_what_rank_0_publishes_is_found(run):
    assert find(run, "7/a") is None
    publish(run, MEETING)
    assert find(run, "7/a") == MEETING
    assert (run.attempt_folder(1) / FILE).is_file()


def test_the_rendezvous_of_another_start_is_none(run):
    """A job that was requeued finds the file of its first start."""
    publish(run, MEETING)
    assert find(run, "7/b") is None


def test_without_an_attempt_it_is_in_the_run_s_folder_and_has_a_reason(run):
    publish(run, Rendezvous(start="7/b", reason="done already"))
    found = find(run, "7/b")
    assert (found.attempt, found.reason, found.members) == (0, "done already", ())
    assert (run.path / FILE).is_file()
    publish(run, Rendezvous(start="7/c", reason="next"))
    assert find(run, "7/b") is None


def test_a_later_attempt_does_not_hide_the_one_before_it(run):
    """Two jobs of one run: the second begins while ranks of the first still poll."""
    publish(run, MEETING)
    run.begin_attempt(run.config(), {})
    assert find(run, "7/a") == MEETING


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"start": "7/a", "members": 5}', '{"start": "7/a", "color": 1}', "\0", '"7/a"']
)
def test_a_damaged_file_is_none(run, content):
    (run.attempt_folder(1) / FILE).write_text(content)
    assert find(run, "7/a") is None
    publish(run, MEETING)
    assert find(run, "7/a") == MEETING


def test_a_pipe_in_place_of_the_file_is_none(run):
    os.mkfifo(run.attempt_folder(1) / FILE)
    assert find(run, "7/a") is None


def test_a_rank_waits_until_rank_0_has_published(run, monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.001)
    timer = threading.Timer(0.02, publish, (run, MEETING))
    timer.start()
    assert wait(run, "7/a", seconds=30) == MEETING
    timer.join()


def test_a_rank_does_not_wait_for_ever(run, monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.001)
    begin = time.monotonic()
    with pytest.raises(TitanlabError) as caught:
        wait(run, "7/a", seconds=0.01)
    assert time.monotonic() - begin < 10
    where = run.path / "attempts"
    assert str(caught.value) == f"rank 0 of this job has begun no attempt in {where} within 0.01 s; see its log"


def test_a_rendezvous_that_is_there_needs_no_time(run):
    publish(run, MEETING)
    assert wait(run, "7/a", seconds=0) == MEETING


def test_the_file_names_its_version(run):
    publish(run, MEETING)
    assert json.loads((run.attempt_folder(1) / FILE).read_text())["schema"] == 1

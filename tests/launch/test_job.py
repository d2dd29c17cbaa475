"""One process of a job: what it is called, which recipe it has, and what a second signal means."""

import json
import os
import re
import signal

import pytest

from tests import tiny
from titanlab.distributed import ALONE
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, Submission, write_submission
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.job import Job, received_signals, say, submitted
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path / "runs", steps=3))


def job_of(run, *, launcher="slurm", restart=0, rank=0, **given):
    ranks = tiny.replace(ALONE, rank=rank, world=4)
    place = ProcessPlace(
        launcher=launcher, job_id="12_1", raw_job_id="14", restart=restart, ranks=ranks, nodes=("n1", "n2")
    )
    return Job(**{"run": run, "place": place, "token": "aa", "index": 1, **given})


def test_a_start_has_one_name_in_all_its_processes(run):
    assert job_of(run).start == job_of(run, rank=3).start == "aa/1 slurm:14.0"
    assert job_of(run, restart=2).start == "aa/1 slurm:14.2"
    assert [job_of(run).round(number) for number in (0, 1, 2)] == [
        *["aa/1 slurm:14.0", "aa/1 slurm:14.0 #1", "aa/1 slurm:14.0 #2"]
    ]


def test_rank_0_leads(run):
    assert [job_of(run, rank=rank).leads for rank in (0, 1)] == [True, False]


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


@pytest.mark.parametrize(
    ("restart", "made_by", "goes_on"),
    [
        (1, {"token": "aa", "index": 1}, True),
        (0, {"token": "aa", "index": 1}, False),
        (1, {"token": "aa", "index": 0}, False),
        (1, {"token": "bb", "index": 1}, False),
        (1, None, False),
    ],
)
def test_a_start_goes_on_with_the_attempt_of_an_earlier_start(run, restart, made_by, goes_on):
    if made_by is not None:
        (run.attempt_folder(1) / "job.json").write_text(json.dumps(made_by))
    assert job_of(run, restart=restart).goes_on is goes_on


@pytest.mark.parametrize("kind", [None, OutcomeKind.CRASH, OutcomeKind.DONE])
def test_a_run_that_is_done_is_told(run, kind, capsys):
    if kind is not None:
        run.write_result(Outcome(kind=kind, attempt=1, step=3, steps=3))
    done = kind is OutcomeKind.DONE
    assert job_of(run).is_done() is done
    told = capsys.readouterr().out
    assert re.fullmatch(rf"\d\d:\d\d:\d\d  {run.path.name} is done: 3 steps\n", told) if done else told == ""


def test_the_recipe_is_the_runs_with_the_jobs_changes(run):
    whole = to_mapping(tiny.recipe(run.path.parent.parent, steps=3))
    assert job_of(run).config() == run.config()
    assert run.config()["training"] == whole["training"]
    changed = job_of(run, launch={"kind": "local", "at_once": 2}, changes={"world": 4, "launch": {"kind": "lost"}})
    assert changed.config() == {**run.config(), "world": 4, "launch": {"kind": "local", "at_once": 2}}


def test_facts_are_plain(run):
    job_of(run, restart=2).note(run.begin_attempt({}, {}))
    facts = run.job()
    started = facts.pop("started")
    assert started > 1e9
    assert facts == {
        "schema": 1,
        "launcher": "slurm",
        "job_id": "12_1",
        "raw_job_id": "14",
        "restart_count": 2,
        "nodes": ["n1", "n2"],
        "token": "aa",
        "index": 1,
    }


def test_a_submission_is_found_by_its_token(tmp_path):
    shape = JobShape(processes=1, tasks_per_node=1)
    for token in ("aa", "bb"):
        given = {"launcher": "local", "code": "", "shape": shape, "launch": {}, "runs": ("one",)}
        write_submission(tmp_path, Submission(token=token, **given))
    assert submitted(tmp_path, "bb").token == "bb"
    told = f"submission=cc: is not in {tmp_path}; submit the sweep again"
    with pytest.raises(ConfigError, match=re.escape(told)):
        submitted(tmp_path, "cc")


def test_stop_signals_are_collected_in_their_order():
    before = signal.getsignal(signal.SIGTERM)
    with received_signals() as signals:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.kill(os.getpid(), number)
    assert [number for number, _ in signals] == [signal.SIGTERM, signal.SIGUSR2]
    assert signals[0][1] <= signals[1][1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_log_that_is_closed_stops_nothing(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert say("a line") is None

"""After an attempt, the ranks that answer and those that are lost with their node."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests import tiny
from titanlab.distributed import ALONE
from titanlab.launch import group as roll_call
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.group import Loss, RankGroup, answer_call, lost_ranks, node_of
from titanlab.launch.launchers_schema import Local
from titanlab.records import Outcome, OutcomeKind


def place(world=6, nodes=("n1", "n2", "n3")):
    ranks = replace(ALONE, world=world)
    return ProcessPlace(launcher="slurm", job_id="12_0", raw_job_id="12", ranks=ranks, nodes=nodes)


class Job:
    """Rank 0 of a job whose scheduler has taken away some nodes."""

    def __init__(self, run, taken=(), where=None):
        self.run, self.place, self.signals = run, where or place(), []
        self.launcher = SimpleNamespace(lost_nodes=lambda place: frozenset(taken))

    def round(self, number):
        return f"job #{number}"

    def config(self):
        return self.run.config()


@pytest.fixture
def recipe(tmp_path):
    return replace(tiny.recipe(tmp_path, shard=6), launch=Local(restarts=5, min_world=2))


@pytest.fixture
def run(recipe):
    return tiny.begin(recipe)


def all_but(run, *absent):
    for rank in set(range(1, 6)) - set(absent):
        answer_call(run, 1, rank)


def test_ranks_fill_the_nodes_in_order():
    assert [node_of(place(), rank) for rank in range(6)] == ["n1", "n1", "n2", "n2", "n3", "n3"]


def test_nobody_waits_when_all_answer_or_the_scheduler_knows(run):
    all_but(run)
    assert lost_ranks(Job(run), 1, seconds=600) == Loss()
    (run.attempt_folder(1) / roll_call.ANSWERS / "4").unlink()
    # The other rank of a node that was taken away is about to be ended.
    found = lost_ranks(Job(run, taken=["n3"]), 1, seconds=600)
    words = "ranks 4, 5 on n3 are lost: slurm has taken node n3 from the job"
    assert found == Loss(ranks=(4, 5), nodes=("n3",), words=words)
    assert lost_ranks(Job(run, taken=["n3"]), 1, known=(4, 5), seconds=600) == Loss()


def test_ranks_without_an_answer_are_lost_after_a_time(run):
    all_but(run, 3)
    found = lost_ranks(Job(run), 1, seconds=0.1)
    assert found == Loss(ranks=(3,), nodes=(), words="rank 3 on n2 does not answer within 0.1 s")
    # A late answer counts.
    late = threading.Timer(0.3, answer_call, (run, 1, 3))
    late.start()
    assert lost_ranks(Job(run), 1, seconds=60) == Loss()
    late.join()


def test_a_stopped_job_waits_for_nobody(run):
    job = Job(run)
    job.signals.append((15, time.monotonic()))
    assert lost_ranks(job, 1, seconds=600) == Loss()


def decided(job, recipe, said, kind=OutcomeKind.CRASH):
    group = RankGroup(job, said.append)
    outcome = Outcome(kind=kind, attempt=1, step=3, rank=1, cause="Connection closed by peer", echo=True)
    outcome = group.called(outcome, recipe)
    return group, outcome, group.goes_on_after(outcome, recipe)


def test_the_group_goes_on_without_a_lost_node(run, recipe):
    all_but(run, 2, 3)
    said = []
    group, outcome, goes_on = decided(Job(run, taken=["n2"]), recipe, said)
    assert goes_on
    assert (outcome.kind, outcome.rank) == (OutcomeKind.NODE_FAIL, 2)
    assert outcome.cause.endswith("slurm has taken node n2 from the job; Connection closed by peer")
    assert run.result(1).kind is OutcomeKind.NODE_FAIL
    assert (group.members, group.config()["world"]) == ((0, 1, 4, 5), 4)
    assert "on n2 are lost: slurm has taken node n2 from the job, and left out: dp_s6 becomes dp_s4" in said[-1]
    # In the next attempt n3 is lost too: its ranks are 2 and 3 there, and the ranks of n2 are expected no more.
    run.attempt_folder(2).mkdir()
    answer_call(run, 2, 1)
    group._job.launcher.lost_nodes = lambda place: frozenset(["n2", "n3"])
    outcome = group.called(replace(outcome, kind=OutcomeKind.HANG, attempt=2, step=6), group.recipe())
    assert (outcome.kind, outcome.rank) == (OutcomeKind.NODE_FAIL, 2)
    assert group.goes_on_after(outcome, group.recipe())
    assert group.members == (0, 1)


def test_without_enough_ranks_the_job_ends_and_has_lost_a_node(run, recipe):
    recipe = replace(recipe, launch=Local(restarts=5, min_world=5))
    all_but(run, 4, 5)
    said = []
    group, outcome, goes_on = decided(Job(run, taken=["n3"]), recipe, said)
    assert not goes_on
    assert group.has_lost_nodes
    assert outcome.kind is OutcomeKind.NODE_FAIL
    assert "from the job, and no smaller layout of at least launch.min_world=5 processes fits" in said[-1]


def test_without_min_world_nobody_is_asked(run, recipe):
    recipe = replace(recipe, launch=Local(restarts=5))
    group, outcome, goes_on = decided(Job(run, taken=["n2"]), recipe, [])
    assert (goes_on, group.members, outcome.kind) == (True, (), OutcomeKind.CRASH)


def test_spare_ranks_take_the_places_of_lost_ones(run, recipe):
    job = Job(run, taken=["n2"])
    group = RankGroup(job, lambda line: None)
    small = replace(tiny.recipe(run.path.parent.parent.parent, shard=2), launch=recipe.launch)
    group.members = (0, 2)
    all_but(run, 2, 3)
    outcome = group.called(Outcome(kind=OutcomeKind.CRASH, attempt=1, step=3), small)
    said = []
    group.report = said.append
    assert group.goes_on_after(outcome, small)
    assert (group.members, group.config()["world"]) == ((0, 1), 2)
    assert "and left out: other processes of the job take their places in dp_s2" in said[-1]


def test_a_job_that_starts_on_fewer_nodes_is_smaller(run, recipe):
    said = []
    job = Job(run, where=place(world=5, nodes=("n1",)))
    job.config = lambda: {**run.config(), "launch": {**run.config()["launch"], "restarts": 5, "min_world": 2}}
    group = RankGroup(job, said.append)
    assert (group.recipe().layout.world, group.members) == (4, (0, 1, 2, 3))
    assert said[0].startswith("the job has 5 processes: dp_s6 becomes dp_s4, the most data-parallel processes")

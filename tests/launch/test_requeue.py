"""Jobs put themselves back into the queue, after a lost node for fewer nodes too."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests import tiny
from titanlab.distributed import ALONE
from titanlab.launch import group as module
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.group import fewest_nodes, requeue_after, requeue_without_rank_0
from titanlab.launch.launchers_schema import Local
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind

NODES = ("n1", "n2", "n3", "n4")


class Launcher:
    can_requeue = True

    def __init__(self, taken=()):
        self.taken, self.calls = taken, []

    def lost_nodes(self, place):
        return frozenset(self.taken)

    def requeue(self, place):
        self.calls.append("all")

    def requeue_on_fewer(self, place, *, least, most):
        self.calls.append((least, most))


def job_of(recipe, *, rank=0, taken=(), **launch):
    run = tiny.begin(recipe)
    place = ProcessPlace(
        launcher="slurm",
        job_id="12_0",
        raw_job_id="12",
        ranks=replace(ALONE, rank=rank, world=8),
        nodes=NODES,
    )
    return SimpleNamespace(
        run=run,
        place=place,
        signals=[],
        launcher=Launcher(taken),
        launch={"requeue": True, "max_requeues": 3, **launch},
        config=lambda: to_mapping(recipe),
    )


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_NEXT_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOST_SECONDS", 0.1)


@pytest.fixture
def recipe(tmp_path):
    return replace(tiny.recipe(tmp_path, shard=8, global_batch=8), launch=Local(restarts=3, min_world=3))


def test_the_fewest_nodes(recipe):
    # Two processes a node: four is the smallest layout of at least three.
    assert fewest_nodes(job_of(recipe)) == 2
    assert fewest_nodes(job_of(replace(recipe, launch=Local(restarts=3, min_world=8)))) is None
    assert fewest_nodes(job_of(replace(recipe, launch=Local(restarts=3)))) is None


@pytest.mark.parametrize(
    ("kind", "has_saved", "has_lost_nodes", "calls"),
    [
        (OutcomeKind.PREEMPTED, False, False, ["all"]),
        (OutcomeKind.WALLTIME, True, False, ["all"]),
        (OutcomeKind.WALLTIME, False, False, []),
        (OutcomeKind.CRASH, True, False, []),
        (OutcomeKind.NODE_FAIL, True, True, [(2, 4)]),
        # A device that failed: nothing says that the next start has another one.
        (OutcomeKind.NODE_FAIL, True, False, []),
    ],
)
def test_ends_after_which_a_job_goes_on(recipe, kind, has_saved, has_lost_nodes, calls):
    job = job_of(recipe)
    requeue_after(job, Outcome(kind=kind), has_saved=has_saved, has_lost_nodes=has_lost_nodes)
    assert job.launcher.calls == calls


def test_not_without_launch_requeue_nor_too_often(recipe, capsys):
    job = job_of(recipe, requeue=False)
    requeue_after(job, Outcome(kind=OutcomeKind.NODE_FAIL), has_saved=True, has_lost_nodes=True)
    assert job.launcher.calls == []
    job = job_of(recipe, max_requeues=0)
    requeue_after(job, Outcome(kind=OutcomeKind.NODE_FAIL), has_saved=True, has_lost_nodes=True)
    assert job.launcher.calls == []
    said = capsys.readouterr().out
    assert "launch.requeue=false" in said
    assert "it has been 0 times (launch.max_requeues)" in said


@pytest.mark.parametrize(
    ("rank", "taken", "done", "calls"),
    [
        # The first rank of each other node tries it; the scheduler takes the first request.
        (2, ("n1",), True, [(2, 4)]),
        (4, ("n1", "n2"), True, [(2, 4)]),
        (3, ("n1",), False, []),
        # Rank 0 is on a node that the job still has.
        (2, ("n2",), False, []),
        (2, (), False, []),
    ],
)
def test_after_the_first_node_is_lost_another_rank_does_it(recipe, rank, taken, done, calls):
    job = job_of(recipe, rank=rank, taken=taken)
    assert requeue_without_rank_0(job, recipe, 1) is done
    assert job.launcher.calls == calls


def test_not_when_rank_0_has_written_its_result_or_the_job_ends_with_a_node(recipe):
    job = job_of(recipe, rank=2, taken=("n1",))
    assert not requeue_without_rank_0(job, replace(recipe, launch=Local(restarts=3)), 1)
    job.launcher.taken = ()
    job.run.write_result(Outcome(kind=OutcomeKind.CRASH))
    assert not requeue_without_rank_0(job, recipe, 1)
    assert job.launcher.calls == []

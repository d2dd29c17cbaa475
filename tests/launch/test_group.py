"""The ranks of a job over its attempts: who is lost, who starts again, and what goes back into the queue."""

import json
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.sweep.jobs import Jobs, ended
from titanlab.distributed import ALONE
from titanlab.errors import ConfigError
from titanlab.launch import job as module
from titanlab.launch import task, write_submission
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.execute import Attempts
from titanlab.launch.job import Loss, Rendezvous, answer_call, find_meeting, lost_ranks
from titanlab.launch.launchers_schema import Local
from titanlab.launch.task import requeue_after, requeue_without_rank_0
from titanlab.launch.watch import ranks_in
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


def started(jobs, world, launch, **given):
    """The run, exit codes and output of a job of several ranks."""
    run = jobs.run(world, steps=6, every=2, **given)
    submission, _ = jobs.job_of(run)
    write_submission(jobs.sweep.path, replace(submission, launch=asdict(launch)))
    codes, said = ended(jobs.start(run, world))
    return run, codes, said


def record(run, attempt):
    return json.loads((run.attempt_folder(attempt) / "restart.json").read_text())


def test_members_are_numbered_anew_and_keep_their_devices():
    third = replace(ALONE, rank=2, world=4, local_rank=2, local_world=4)
    met = ranks_in(third, Rendezvous(start="", address="n1", port=7, members=(0, 2, 3)))
    assert (met.rank, met.world, met.local_rank, met.local_world) == (1, 3, 2, 4)
    assert ranks_in(third, Rendezvous(start="", port=7)).rank == 2


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

    def check_code(self):
        pass


def group_of(job, said):
    """The attempts of a job with a task for each rank, as the task of rank 0 makes them."""
    group = Attempts(job.run, None, job=job)
    group.report = said.append
    return group


def test_rank_0_decides_and_tells_the_others(tmp_path):
    recipe = replace(tiny.recipe(tmp_path, shard=4), launch=Local(restarts=5, min_world=1))
    run = tiny.begin(recipe)
    job, said = Job(run, where=place(world=4)), []
    group = group_of(job, said)

    def dies(rank):
        outcome = Outcome(kind=OutcomeKind.CRASH, attempt=1, step=3, rank=rank)
        return group.goes_on_after(outcome, recipe if group.round < 2 else group.restart.recipe)

    assert dies(2)
    assert (group.round, group.members) == (1, ())
    assert dies(2)
    # Numbers of the job's ranks; three processes are left, and three divide the 12 sequences of a step.
    assert (group.round, group.members, group.restart.recipe.layout.world) == (2, (0, 1, 3), 3)
    assert "rank 2 has failed twice and is left out: dp_s4 becomes dp_s3" in said[-1]
    assert find_meeting(run, "job #3") is None
    job.signals.append((15, 0.0))
    assert not dies(1)
    assert find_meeting(run, "job #3").reason == "has ended"


def test_a_job_does_not_train_another_recipe_under_the_name_of_its_run(tmp_path):
    """Somebody edited config.yaml while the run waited in the queue."""
    run = tiny.begin(tiny.recipe(tmp_path))
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("  lr: 0.001\n", "  lr: 0.1\n"))
    with pytest.raises(ConfigError, match=r"^optimizer.lr=0.1: the run was made with 0.001, by its identity.json"):
        group_of(Job(run), []).recipe()


@pytest.mark.full
def test_a_rank_of_a_job_that_fails_twice_is_left_out(jobs):
    launch = Local(restarts=4, min_world=1, threads=1)
    run, codes, said = started(jobs, 3, launch, fault="kill", step=4, rank=2)
    assert codes == [0, 0, 0], said
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2, 3])
    assert (record(run, 3)["left_out"], record(run, 3)["world"]) == (2, 2)
    assert "this rank is left out of attempt 3" in said
    assert run.config(3)["parallelism"]["replicate"] == 2


@pytest.fixture
def recipe(tmp_path):
    return replace(tiny.recipe(tmp_path, shard=6), launch=Local(restarts=5, min_world=2))


@pytest.fixture
def run(recipe):
    return tiny.begin(recipe)


def all_but(run, *absent):
    for rank in set(range(1, 6)) - set(absent):
        answer_call(run, 1, rank)


def test_nobody_waits_when_all_answer_or_the_scheduler_knows(run):
    all_but(run)
    assert lost_ranks(Job(run), 1, seconds=600) == Loss()
    (run.attempt_folder(1) / module.ANSWERS / "4").unlink()
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
    group = group_of(job, said)
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
    assert (group.members, group.restart.recipe.layout.world) == ((0, 1, 4, 5), 4)
    assert "on n2 are lost: slurm has taken node n2 from the job, and left out: dp_s6 becomes dp_s4" in said[-1]
    # In the next attempt n3 is lost too: its ranks are 2 and 3 there, and the ranks of n2 are expected no more.
    run.attempt_folder(2).mkdir()
    answer_call(run, 2, 1)
    group.job.launcher.lost_nodes = lambda place: frozenset(["n2", "n3"])
    outcome = group.called(replace(outcome, kind=OutcomeKind.HANG, attempt=2, step=6), group.restart.recipe)
    assert (outcome.kind, outcome.rank) == (OutcomeKind.NODE_FAIL, 2)
    assert group.goes_on_after(outcome, group.restart.recipe)
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
    group = group_of(job, [])
    small = replace(tiny.recipe(run.path.parent.parent.parent, shard=2), launch=recipe.launch)
    group.members = (0, 2)
    all_but(run, 2, 3)
    outcome = group.called(Outcome(kind=OutcomeKind.CRASH, attempt=1, step=3), small)
    said = []
    group.report = said.append
    assert group.goes_on_after(outcome, small)
    assert (group.members, group.restart.recipe.layout.world) == ((0, 1), 2)
    assert "and left out: other processes of the job take their places in dp_s2" in said[-1]


def test_a_job_that_starts_on_fewer_nodes_is_smaller(run, recipe):
    said = []
    job = Job(run, where=place(world=5, nodes=("n1",)))
    job.config = lambda: {**run.config(), "launch": {**run.config()["launch"], "restarts": 5, "min_world": 2}}
    group = group_of(job, said)
    assert (group.recipe().layout.world, group.members) == (4, (0, 1, 2, 3))
    assert said[0].startswith("the job has 5 processes: dp_s6 becomes dp_s4, the most data-parallel processes")


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


def job_of(eight, *, rank=0, taken=(), **launch):
    run = tiny.begin(eight)
    place = ProcessPlace(
        launcher="slurm", job_id="12_0", raw_job_id="12", ranks=replace(ALONE, rank=rank, world=8), nodes=NODES
    )
    return SimpleNamespace(
        run=run,
        place=place,
        signals=[],
        launcher=Launcher(taken),
        submission=SimpleNamespace(launch={"requeue": True, "max_requeues": 3, **launch}),
        config=lambda: to_mapping(eight),
    )


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(task, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(task, "_NEXT_SECONDS", 0.0)
    monkeypatch.setattr(task, "LOST_SECONDS", 0.1)


@pytest.fixture
def eight(tmp_path):
    return replace(tiny.recipe(tmp_path, shard=8, global_batch=8), launch=Local(restarts=3, min_world=3))


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
def test_ends_after_which_a_job_goes_on(eight, kind, has_saved, has_lost_nodes, calls):
    job = job_of(eight)
    requeue_after(job, Outcome(kind=kind), has_saved=has_saved, has_lost_nodes=has_lost_nodes)
    assert job.launcher.calls == calls


def test_not_without_launch_requeue_nor_too_often(eight, capsys):
    job = job_of(eight, requeue=False)
    requeue_after(job, Outcome(kind=OutcomeKind.NODE_FAIL), has_saved=True, has_lost_nodes=True)
    assert job.launcher.calls == []
    job = job_of(eight, max_requeues=0)
    requeue_after(job, Outcome(kind=OutcomeKind.NODE_FAIL), has_saved=True, has_lost_nodes=True)
    assert job.launcher.calls == []
    said = capsys.readouterr().out
    assert "launch.requeue=false" in said
    assert "it has been put back 0 times (launch.max_requeues)" in said


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
def test_after_the_first_node_is_lost_another_rank_does_it(eight, rank, taken, done, calls):
    job = job_of(eight, rank=rank, taken=taken)
    assert requeue_without_rank_0(job, eight, 1) is done
    assert job.launcher.calls == calls


def test_not_when_rank_0_has_written_its_result_or_the_job_ends_with_a_node(eight):
    job = job_of(eight, rank=2, taken=("n1",))
    assert not requeue_without_rank_0(job, replace(eight, launch=Local(restarts=3)), 1)
    job.launcher.taken = ()
    job.run.write_result(Outcome(kind=OutcomeKind.CRASH))
    assert not requeue_without_rank_0(job, eight, 1)
    assert job.launcher.calls == []

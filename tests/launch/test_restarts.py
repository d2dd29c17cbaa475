"""After a rank has died the group starts again in place: the rules, and real ranks that die."""

import json
import os
import signal
from dataclasses import replace

import pytest

from tests import tiny
from tests.launch.command import ROOT
from tests.planted_package import install_planted
from tests.planted_schema import Planted
from titanlab.distributed import this_host
from titanlab.launch import RankProcesses, continue_run, processes
from titanlab.launch.attempt import Restarts, reduced
from titanlab.launch.launchers_schema import Local
from titanlab.launch.processes import hide_device, visible_devices
from titanlab.records import RESTART, Outcome, OutcomeKind
from titanlab.system import Console

IN_VAIN = "not restarted: 2 restarts in a row have reached no further step and saved no checkpoint"
OOM_IN_VAIN = "not restarted: 1 restart has reached no further step and saved no checkpoint"


def ended(kind=OutcomeKind.CRASH, *, step=0, rank=None, attempt=1, cause="killed by SIGKILL"):
    return Outcome(kind=kind, step=step, rank=rank, attempt=attempt, cause=cause)


def decided(tmp_path, ends, *, most=5, min_world=None, fixed=(), **given):
    """What is decided after each end: the world of the next attempt, or why there is none."""
    recipe = tiny.recipe(tmp_path, **given)
    run = tiny.begin(recipe)
    decides = Restarts(run, Local(restarts=most, min_world=min_world), fixed=fixed)
    said = []
    for number, end in enumerate(ends, start=1):
        restart, why_not = decides.after(replace(end, attempt=number), recipe)
        if restart is None:
            said.append(why_not)
            break
        recipe = restart.recipe
        said.append(recipe.layout.world)
    return said


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        # Each attempt gets further.
        ([ended(step=3), ended(step=5), ended(step=7)], [2, 2, 2]),
        # Two restarts gain nothing.
        ([ended(step=3)] * 3, [2, 2, IN_VAIN]),
        # What was gained between them counts.
        ([ended(step=3), ended(step=3), ended(step=4), ended(step=4)], [2, 2, 2, 2]),
        ([ended(step=step) for step in range(1, 7)], [2] * 5 + ["not restarted: launch.restarts=5 are used up"]),
        ([ended(OutcomeKind.OOM, step=3)] * 2, [2, OOM_IN_VAIN]),
        ([ended(OutcomeKind.OOM, step=3), ended(OutcomeKind.OOM, step=9)], [2, 2]),
        ([ended(OutcomeKind.HANG, step=3), ended(OutcomeKind.NODE_FAIL, step=3)], [2, 2]),
        *(([ended(kind, step=3)], [""]) for kind in (
            OutcomeKind.NAN, OutcomeKind.CANCELLED, OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME, OutcomeKind.INFEASIBLE,
            OutcomeKind.DATA, OutcomeKind.DONE)),
        ([ended(cause="the disk is full")], [""]),
    ],
)  # fmt: skip
def test_when_a_group_starts_again(tmp_path, ends, said):
    assert decided(tmp_path, ends, shard=2) == said


@pytest.mark.parametrize(
    ("ranks", "given", "worlds"),
    [
        # Six sequences of 12 for each of two: five processes do not divide 12, four do.
        ([1, 1], {"shard": 6}, [6, 4]),
        # Others fail each time: none is left out.
        ([1, 2, 1], {"shard": 6}, [6, 6, IN_VAIN]),
        ([0, 0], {"replicate": 2, "tensor": 2}, [4, 2]),
        # A pipeline keeps its stages: there is nothing smaller.
        ([1, 1], {"pipeline": 2}, [2, 2]),
    ],
)  # fmt: skip
def test_a_rank_that_fails_twice_is_left_out(tmp_path, ranks, given, worlds):
    assert decided(tmp_path, [ended(step=3, rank=rank) for rank in ranks], min_world=1, **given) == worlds


def test_the_smaller_group_has_at_least_min_world_processes_and_keeps_what_cannot_be_left_out(tmp_path):
    ends = [ended(step=3, rank=0)] * 2
    assert decided(tmp_path, ends, min_world=4, shard=4) == [4, 4]
    assert decided(tmp_path, ends, min_world=1, fixed=(0,), shard=4) == [4, 4]
    assert decided(tmp_path, ends, min_world=1, shard=4) == [4, 3]


@pytest.mark.parametrize(
    ("given", "usable", "degrees", "microbatch"),
    [
        ({"replicate": 2, "shard": 4, "global_batch": 16}, 7, (1, 4), 2),
        ({"replicate": 4, "shard": 1, "global_batch": 12}, 3, (3, 1), 2),
        ({"shard": 4, "tensor": 2, "global_batch": 8}, 7, (1, 2), 2),
    ],
)  # fmt: skip
def test_the_largest_data_parallel_degree_that_keeps_the_global_batch(tmp_path, given, usable, degrees, microbatch):
    recipe = tiny.recipe(tmp_path, **given)
    smaller = reduced(recipe, usable, 1)
    assert (smaller.layout.replicate, smaller.layout.shard) == degrees
    assert smaller.training.global_batch == recipe.training.global_batch
    # No process holds more activations than before.
    assert smaller.microbatch == microbatch <= recipe.microbatch


def test_the_device_of_a_rank_that_is_left_out_is_hidden(monkeypatch):
    monkeypatch.setattr(processes, "this_host", lambda: replace(this_host(), accelerator="cuda", count=3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    hide_device(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3,GPU-abc"}) == ["3", "GPU-abc"]
    hide_device(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The tests' data, for ranks that are processes of their own."""
    monkeypatch.setenv("PYTHONPATH", f"{install_planted(tmp_path)}:{ROOT}")


def trained(tmp_path, launch, **given):
    """A run whose ranks are real processes, to its end: the run and its outcome."""
    recipe = replace(tiny.recipe(tmp_path, steps=8, every=2, **given), launch=launch)
    run = tiny.begin(recipe)
    run.write_result(ended())
    with Console() as console:
        outcome = continue_run(run, recipe, None, console)
    return run, outcome


def losses(run):
    return [row["loss_metrics/global_avg_loss"] for row in run.metrics("train")]


def record(run, attempt):
    return json.loads((run.attempt_folder(attempt) / RESTART).read_text())


@pytest.mark.full
@pytest.mark.covering
def test_a_rank_that_is_killed_costs_no_step(installed, pool, tmp_path, capsys):
    fault = Planted(fault="kill", step=6, attempt=2)
    run, outcome = trained(tmp_path, Local(restarts=2, threads=1), data=fault)
    assert (outcome.kind, outcome.attempt, outcome.step) == (OutcomeKind.DONE, 3, 8)
    assert run.result(2).kind is OutcomeKind.CRASH
    assert [row["step"] for row in run.metrics("attempt")] == [0, 4]
    written = record(run, 3)
    assert (written["number"], written["after_attempt"], written["left_out"]) == (1, 2, None)
    why = "attempt 2 ended as crash after step 5, rank 0 (killed by SIGKILL"
    assert written["why"].startswith(why)
    assert "restart 1 of 2 from step 4" in written["why"]
    said = capsys.readouterr()
    assert why in (said.out + said.err).replace("\n", " ")
    undisturbed = tiny.recipe(tmp_path, name="undisturbed", steps=8, data=Planted())
    straight = tiny.begin(undisturbed)
    pool.run(1, tiny.as_rank, undisturbed, straight)
    assert losses(run) == losses(straight)


# Before the ranks of an attempt have ended; after it: test_execute.py.
@pytest.mark.full
def test_ctrl_c_while_the_ranks_of_an_attempt_are_ended_begins_no_other(installed, tmp_path, monkeypatch):
    usual = RankProcesses.end

    def end(processes, number, *, seconds):
        os.kill(os.getpid(), signal.SIGINT)
        usual(processes, number, seconds=seconds)

    monkeypatch.setattr(RankProcesses, "end", end)
    run, outcome = trained(tmp_path, Local(restarts=2, threads=1), data=Planted(fault="kill", step=3, attempt=2))
    assert (outcome.kind, run.attempts()) == (OutcomeKind.CRASH, [1, 2])


@pytest.mark.full
def test_a_rank_that_is_killed_again_and_again_is_left_out(installed, pool, tmp_path):
    fault = Planted(fault="kill", step=6, rank=1)
    run, outcome = trained(tmp_path, Local(restarts=5, min_world=1, threads=1), data=fault, shard=2)
    assert (outcome.kind, outcome.attempt) == (OutcomeKind.DONE, 4)
    assert [row["step"] for row in run.metrics("attempt")] == [0, 4, 4]
    assert (record(run, 4)["left_out"], record(run, 4)["world"]) == (1, 1)
    assert "rank 1 has failed twice and is left out: dp_s2 becomes single" in record(run, 4)["why"]
    undisturbed = tiny.recipe(tmp_path, name="undisturbed", steps=8, data=Planted(), shard=2)
    straight = tiny.begin(undisturbed)
    pool.run(2, tiny.as_rank, undisturbed, straight)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-5)

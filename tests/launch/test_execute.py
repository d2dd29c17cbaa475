"""From a recipe to a finished run, with what would start ranks replaced: what is checked, made and recorded when."""

from __future__ import annotations

import io
import os
import shutil
import signal
from dataclasses import replace

import pytest

from tests import tiny
from titanlab.checkpoint import DamagedCheckpoint, latest
from titanlab.checkpoint.folders import step_folder
from titanlab.data.schema import Files
from titanlab.distributed import STOP_SIGNALS, Host, handled_signals
from titanlab.errors import ConfigError
from titanlab.launch import continue_run, prepare
from titanlab.launch.execute import execute
from titanlab.records import Outcome, OutcomeKind, Status, from_exception, list_runs, open_run
from titanlab.system import Console

HOST = Host(accelerator="cpu", device="cpu", count=2)


@pytest.fixture
def starts(monkeypatch):
    """What ranks would have been started with; what they do instead is `starts.then(function)`."""

    class Starts(list):
        def then(self, ranks):
            self.ranks = ranks

    found = Starts()
    found.ranks = lambda folder: {}

    def start(run, ranks, *, attempt, config=None):
        found.append({"folder": run.path, "rank": ranks.rank, "world": ranks.world, "config": config})
        return found.ranks(run.path)

    monkeypatch.setattr("titanlab.launch.processes.start", start)
    for module in ("attempt", "execute"):
        monkeypatch.setattr(f"titanlab.launch.{module}.this_host", lambda: HOST)
    return found


@pytest.fixture
def said():
    return io.StringIO()


@pytest.fixture
def console(said):
    with Console(said, errors=said) as made:
        yield made


def ready(recipe):
    (one,) = prepare([recipe], print)
    return one


def ends(kind=OutcomeKind.DONE, **how):
    """Ranks that record an end, as the one that holds the loss does."""

    def ranks(folder):
        run = open_run(folder)
        run.write_result(Outcome(kind=kind, attempt=max(run.attempts()), **how))
        return {} if kind is OutcomeKind.DONE else {0: kind.exit_code}

    return ranks


def loads(kind):
    """Ranks that load a checkpoint and end."""

    def ranks(folder):
        run = open_run(folder)
        run.open_metrics(max(run.attempts()), resumed_step=2).close()
        return ends(kind)(folder)

    return ranks


def test_the_name_does_not_depend_on_whether_the_data_was_prepared_before(tmp_path, starts, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "".join(f"{n} bottles of beer on the wall, take {n % 7} down and pass them around\n" for n in range(900))
    )
    recipe = replace(
        tiny.recipe(tmp_path, vocab_size=330, seq_len=32), data=Files(files=str(corpus), vocab_size=330, validation_fraction=0.0)
    )  # fmt: skip
    told = []
    first = prepare([recipe], told.append)[0].identity
    assert told
    again = []
    assert prepare([recipe], again.append)[0].identity == first
    assert again == []


def test_a_run_is_born_started_and_recorded(tmp_path, starts, console):
    starts.then(ends(step=10))
    recipe = tiny.recipe(tmp_path, shard=2)
    outcome = execute(ready(recipe), console)
    (run,) = list_runs(tmp_path)
    assert starts == [{"folder": run.path, "rank": 0, "world": 2, "config": None}]
    assert (outcome.kind, outcome.step) == (OutcomeKind.DONE, 10)
    assert run.path == tmp_path / "single" / f"run-{ready(recipe).identity.hash8}"
    assert run.attempts() == [1]
    assert run.config() == run.config(1)
    assert run.config()["parallelism"]["shard"] == 2
    assert run.env(1)["launcher"] == "local"
    assert run.env(1)["devices"] == {"accelerator": "cpu", "name": "cpu", "count": 2}


def test_a_run_that_is_done_is_left_as_it_is(tmp_path, starts, console, said):
    starts.then(ends(step=10, steps=10))
    recipe = tiny.recipe(tmp_path)
    execute(ready(recipe), console)
    assert execute(ready(recipe), console).kind is OutcomeKind.DONE
    assert len(starts) == 1
    assert "is done: 10 steps. For another like it: repeat=1" in said.getvalue()


def test_an_old_wish_to_cancel_is_not_for_the_next_attempt(tmp_path, starts, console):
    recipe = tiny.recipe(tmp_path)
    starts.then(ends(OutcomeKind.CANCELLED, step=4))
    execute(ready(recipe), console)
    (run,) = list_runs(tmp_path)
    run.ask_to_cancel()
    with run.claim(), pytest.raises(ConfigError, match="is locked by"):
        execute(ready(recipe), console)
    # Whoever works on it has still to read it.
    assert run.asked_to_cancel()
    starts.then(ends(step=10))
    execute(ready(recipe), console)
    assert run.asked_to_cancel() is None


def test_another_layout_is_another_attempt_with_a_config_of_its_own(tmp_path, starts, console):
    recipe = tiny.recipe(tmp_path, shard=2)
    starts.then(ends(OutcomeKind.PREEMPTED, step=4))
    execute(ready(recipe), console)
    (run,) = list_runs(tmp_path)
    starts.then(ends(step=10))
    one = ready(tiny.changed(recipe, shard=1)).recipe
    continue_run(run, one, None, console)
    assert [start["world"] for start in starts] == [2, 1]
    assert [run.config(attempt)["parallelism"]["shard"] for attempt in (1, 2)] == [2, 1]
    assert run.config()["parallelism"]["shard"] == 2


@pytest.mark.parametrize(
    ("failures", "notes", "kind", "rank"),
    [
        ({0: 1}, {}, OutcomeKind.CRASH, 0),
        ({1: -9, 0: 1}, {0: ConnectionError("Connection closed by peer")}, OutcomeKind.CRASH, 1),
        ({0: 1, 1: 1}, {1: MemoryError("no more")}, OutcomeKind.OOM, 1),
        ({}, {}, OutcomeKind.CRASH, None),
    ],
)  # fmt: skip
def test_ranks_that_left_no_result_have_one_all_the_same(tmp_path, starts, console, said, failures, notes, kind, rank):
    def ranks(folder):
        run = open_run(folder)
        run.write_status(Status(state="running", step=3, steps=10, attempt=1))
        for number, error in notes.items():
            run.write_failure(from_exception(error, rank=number, attempt=1))
        return failures

    starts.then(ranks)
    outcome = execute(ready(tiny.recipe(tmp_path, shard=2)), console)
    (run,) = list_runs(tmp_path)
    assert (outcome.kind, outcome.step, outcome.steps) == (kind, 3, 10)
    if rank is not None:
        assert outcome.rank == rank
    assert run.result(1).kind is kind
    assert run.status().outcome == kind.value
    assert f"{kind.value}: {kind.meaning}" in said.getvalue()


@pytest.fixture
def heard():
    """What handlers of this process's stop signals are called with."""
    numbers = []
    with handled_signals(STOP_SIGNALS, lambda number, frame: numbers.append(number)):
        yield numbers


def started_by_torchrun(monkeypatch, rank):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_after_the_ranks_have_ended_waits_for_the_record(
    tmp_path, starts, console, monkeypatch, heard, number
):
    """torchrun sends SIGTERM to rank 0 as soon as it sees that another rank has failed."""
    started_by_torchrun(monkeypatch, 0)

    def ranks(folder):
        run = open_run(folder)
        run.write_failure(from_exception(LookupError("planted"), rank=1, attempt=1))
        os.kill(os.getpid(), number)
        return {0: 1}

    starts.then(ranks)
    recipe = replace(tiny.recipe(tmp_path, shard=2), world=None)
    outcome = execute(ready(recipe), console)
    (run,) = list_runs(tmp_path)
    assert (outcome.kind, outcome.rank) == (OutcomeKind.CRASH, 1)
    assert (run.result(1).kind, run.result(1).rank) == (OutcomeKind.CRASH, 1)
    # Afterwards, signals have their meaning again.
    assert heard == []
    os.kill(os.getpid(), number)
    assert heard == [number]


def test_a_signal_after_the_ranks_have_ended_keeps_the_group_from_starting_again(tmp_path, starts, console, heard):
    def ranks(folder):
        os.kill(os.getpid(), signal.SIGINT)
        return {0: 1}

    starts.then(ranks)
    recipe = tiny.recipe(tmp_path)
    outcome = execute(ready(replace(recipe, launch=replace(recipe.launch, restarts=2))), console)
    (run,) = list_runs(tmp_path)
    assert (outcome.kind, len(starts), run.attempts()) == (OutcomeKind.CRASH, 1, [1])


@pytest.mark.parametrize("rank", [None, 0])
def test_a_signal_before_the_ranks_exist_ends_the_attempt(tmp_path, starts, console, said, monkeypatch, heard, rank):
    if rank is not None:
        started_by_torchrun(monkeypatch, rank)
    recipe = replace(tiny.recipe(tmp_path, shard=2), world=None if rank == 0 else 2)
    run = stopped_at(recipe, starts, console, [4], noted=True)
    monkeypatch.setattr(
        "titanlab.launch.execute.keep_tokenizer", lambda run, recipe: os.kill(os.getpid(), signal.SIGTERM)
    )
    outcome = execute(ready(recipe), console)
    assert (outcome.kind, outcome.step, outcome.attempt) == (OutcomeKind.PREEMPTED, 4, 2)
    assert (len(starts), run.result(2)) == (1, outcome)
    cause = "asked to end by SIGTERM; the run can be resumed (before its ranks were started)"
    assert f"preempted: {cause}" in said.getvalue()


def test_ranks_of_others_keep_one_record(tmp_path, starts, console, monkeypatch):
    started_by_torchrun(monkeypatch, 0)
    recipe = replace(tiny.recipe(tmp_path, shard=2), world=None)
    starts.then(ends(step=10))
    first = ready(recipe)
    assert (first.ranks.world, first.recipe.world) == (2, 2)
    assert execute(first, console).kind is OutcomeKind.DONE
    (run,) = list_runs(tmp_path)
    assert run.env(1)["launcher"] == "torchrun"
    # The other rank starts its worker too, with the recipe in its hand, and records nothing.
    (run.path / "result.json").unlink()
    monkeypatch.setenv("RANK", "1")
    starts.then(lambda folder: {1: OutcomeKind.NAN.exit_code})
    assert execute(ready(recipe), console).kind is OutcomeKind.NAN
    assert [start["rank"] for start in starts] == [0, 1]
    assert starts[1]["config"]["world"] == 2
    assert run.attempts() == [1]


def stopped_at(recipe, starts, console, steps, *, noted):
    """A run that was stopped, with whole checkpoints of some steps, of which its attempt has noted the last."""
    starts.then(ends(OutcomeKind.CANCELLED, step=max(steps, default=0)))
    execute(ready(recipe), console)
    (run,) = list_runs(recipe.runs)
    shapes = {name: list(shape) for name, shape in recipe.model.account().parameters.items()}
    for step in steps:
        position = {"step": step, "tokens": step, "data": {"samples": step * recipe.training.global_batch}}
        tiny.write_checkpoint(step_folder(run.checkpoints, step), {**position, "parameters": shapes})
    if noted:
        run.note_saved(1, max(steps))
    return run


def test_one_that_lacks_its_newest_checkpoint_goes_on_and_says_so(tmp_path, starts, console, said):
    recipe = tiny.recipe(tmp_path)
    run = stopped_at(recipe, starts, console, [4, 6], noted=True)
    shutil.rmtree(step_folder(run.checkpoints, 6))
    execute(ready(recipe), console)
    line = "goes on from step 4: the checkpoint of step 6, which was saved later, is not among its checkpoints"
    assert line in said.getvalue()
    assert run.attempts() == [1, 2]


def test_going_back_to_an_older_checkpoint_puts_the_later_ones_aside(tmp_path, starts, console, said):
    recipe = tiny.recipe(tmp_path)
    run = stopped_at(recipe, starts, console, [2, 4, 6], noted=True)
    starts.then(loads(OutcomeKind.CANCELLED))
    continue_run(run, recipe, None, console, checkpoint=step_folder(run.checkpoints, 2))
    assert run.has_chosen(2)
    assert "goes on from step 2: step-00000006, which is later, is put aside as step-00000006.aside" in said.getvalue()
    assert latest(run.checkpoints) == step_folder(run.checkpoints, 2)
    assert run.attempts() == [1, 2]


def test_later_checkpoints_count_again_if_the_chosen_one_cannot_be_loaded(tmp_path, starts, console):
    recipe = tiny.recipe(tmp_path)
    run = stopped_at(recipe, starts, console, [2, 4, 6], noted=True)
    starts.then(ends(OutcomeKind.INFEASIBLE))
    continue_run(run, recipe, None, console, checkpoint=step_folder(run.checkpoints, 2))
    assert latest(run.checkpoints) == step_folder(run.checkpoints, 6)


def test_damage_that_ranks_find_in_the_chosen_checkpoint_is_one_line(tmp_path, starts, console, said):
    recipe = tiny.recipe(tmp_path)
    run = stopped_at(recipe, starts, console, [2, 4], noted=True)
    chosen = step_folder(run.checkpoints, 4)

    def ranks(folder):
        attempt = max(run.attempts())
        error = DamagedCheckpoint("run", chosen, "is damaged: its file a has other bytes", "give another checkpoint")
        for rank in (0, 1):
            run.write_failure(from_exception(error, rank=rank, attempt=attempt))
        return dict.fromkeys((0, 1), 2)

    starts.then(ranks)
    said.truncate(0)
    said.seek(0)
    ended = continue_run(run, recipe, None, console, checkpoint=chosen)
    assert said.getvalue() == f"error: run={chosen}: is damaged: its file a has other bytes; give another checkpoint\n"
    assert ended.kind.exit_code == 2
    assert run.result().cause == said.getvalue().removeprefix("error: ").rstrip()


def test_damaged_checkpoints_are_passed_over_in_a_line_each(tmp_path, starts, console, said):
    recipe = tiny.recipe(tmp_path)
    run = stopped_at(recipe, starts, console, [2, 4, 6], noted=True)
    (step_folder(run.checkpoints, 6) / "index.json").write_bytes(b"torn")
    (step_folder(run.checkpoints, 4) / "position.json").unlink()
    execute(ready(recipe), console)
    assert (
        "goes on from step 4: step-00000006 is damaged: its file index.json is not an index of a checkpoint"
        in said.getvalue()
    )
    line = "goes on from step 2: step-00000004 is damaged: its file position.json is missing; it is kept as step-"
    assert line in said.getvalue()
    assert (latest(run.checkpoints), run.attempts()) == (step_folder(run.checkpoints, 2), [1, 2])
    # The last one that is left is not renamed.
    (step_folder(run.checkpoints, 2) / "position.json").unlink()
    with pytest.raises(ConfigError, match="is damaged: its file position.json is missing; give another"):
        execute(ready(recipe), console)
    assert (latest(run.checkpoints), run.attempts()) == (step_folder(run.checkpoints, 2), [1, 2])


def test_a_folder_without_permission_is_told(tmp_path, starts, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"no permission in {tmp_path}"):
        prepare([tiny.recipe(tmp_path / "runs")], print)

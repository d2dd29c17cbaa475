"""The checks and files before an attempt's ranks start, and the outcome after they have ended."""

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from tests import tiny
from titanlab.checkpoint.folders import step_folder
from titanlab.data import source
from titanlab.data.schema import Files
from titanlab.data.tokenizers import load
from titanlab.distributed import ALONE, Host, write_stop
from titanlab.errors import ConfigError
from titanlab.launch import close_dead, conclude, go_back, with_progress
from titanlab.launch.attempt import begin, close_earlier, keep_tokenizer
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status, StopReason


def stopped(recipe, *steps, noted=True):
    """A run with one attempt that has ended, and has saved checkpoints of some steps."""
    run = tiny.begin(recipe)
    shapes = {name: list(shape) for name, shape in recipe.model.account().parameters.items()}
    for step in steps:
        write_position(
            step_folder(run.checkpoints, step), step, parameters=shapes, samples=step * recipe.training.global_batch
        )
    if steps and noted:
        run.note_saved(1, max(steps))
    return run


def write_position(folder, step, *, parameters, samples, tokens=1):
    position = {"step": step, "tokens": tokens, "data": {"samples": samples}, "parameters": parameters}
    tiny.write_checkpoint(folder, position)


def copy_of(run):
    return {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_an_attempt_begins_with_its_recipe_and_its_machine(tmp_path, monkeypatch):
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe, 2, 4)
    changed = tiny.changed(recipe, microbatch=6)
    monkeypatch.setattr("titanlab.launch.attempt.this_host", lambda: Host(accelerator="cpu", device="cpu", count=2))
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setenv("TITANLAB_CORES", "3")
    assert begin(run, changed, print, ranks=replace(ALONE, world=2, local_world=2, started_by="torchrun")) == 2
    assert run.config(2) == to_mapping(changed)
    env = run.env(2)
    assert (env["launcher"], env["devices"]) == ("torchrun", {"accelerator": "cpu", "name": "cpu", "count": 2})
    # As each of its two ranks will decide.
    assert env["threads"] == 3


@pytest.mark.parametrize("noted", [True, False])
def test_an_attempt_does_not_begin_without_the_checkpoints_that_were_saved(tmp_path, noted):
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe, 3, noted=noted)
    if not noted:
        # Runs of earlier versions have no saved.json; their rows of metrics show the step from which one resumed.
        run.open_metrics(1, resumed_step=3).close()
    shutil.rmtree(step_folder(run.checkpoints, 3))
    before = copy_of(run)
    rule = "had saved step 3, and checkpoints/ has no checkpoint any more; bring that folder back; or remove"
    with pytest.raises(ConfigError, match=f"^run=.*: {rule}"):
        begin(run, recipe, print)
    assert copy_of(run) == before


def test_the_step_of_another_run_s_checkpoint_is_no_step_that_was_saved(tmp_path):
    recipe = tiny.recipe(tmp_path, load_from=str(tmp_path / "elsewhere"))
    run = stopped(recipe)
    run.open_metrics(1, resumed_step=3).close()
    assert begin(run, recipe, print) == 2


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"step": 90}, "is of step 90, and the folder's name says 4"),
        ({"recipe": "f" * 64}, "is of another run, whose identity begins with ffffffff"),
    ],
)
def test_a_run_does_not_go_back_to_a_checkpoint_of_another_step_or_run(tmp_path, changed, rule):
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe, 2, 4, 6)
    position = step_folder(run.checkpoints, 4) / "position.json"
    tiny.write_checkpoint(position.parent, {**json.loads(position.read_text()), **changed})
    before = copy_of(run)
    with pytest.raises(ConfigError, match=f"^run=.*{rule}; give another checkpoint .*step-00000002$"):
        go_back(run, recipe, step_folder(run.checkpoints, 4), print)
    assert copy_of(run) == before


def test_an_attempt_begins_where_the_logs_of_earlier_ones_were_removed(tmp_path):
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe)
    shutil.rmtree(run.logs)
    assert begin(run, recipe, print) == 2
    assert run.logs.is_dir()


@pytest.mark.parametrize("name", ["attempts", "logs"])
@pytest.mark.parametrize("target", [None, "nowhere"], ids=["a file", "a link to nothing"])
def test_what_stands_where_a_folder_of_the_run_was_is_one_line(tmp_path, name, target):
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe)
    shutil.rmtree(run.path / name)
    if target is None:
        (run.path / name).touch()
    else:
        (run.path / name).symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=f"^run=.*{name}: is not a folder; remove it$"):
        begin(run, recipe, print)
    assert run.attempts() == ([1] if name == "logs" else [])


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank-0.log", "logs/wandb.log"])
def test_an_attempt_does_not_begin_where_it_would_append_to_the_file_behind_a_link(tmp_path, name):
    """A run of a stranger may have such a link."""
    recipe = tiny.recipe(tmp_path)
    run = stopped(recipe)
    (tmp_path / "precious").write_text("precious")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=f"^run=.*{name}: is a symbolic link, and this attempt would .*; remove it$"):
        begin(run, recipe, print)
    assert ((tmp_path / "precious").read_text(), run.attempts()) == ("precious", [1])


def test_a_rank_s_own_record_has_priority_over_its_exit_code(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    run.write_failure(Outcome(kind=OutcomeKind.NAN, step=3, rank=1, attempt=1, cause="the loss is not finite"))
    outcome = conclude(run, 1, {0: -9, 1: 1})
    assert (outcome.kind, outcome.rank, outcome.cause) == (OutcomeKind.NAN, 1, "the loss is not finite")
    assert run.result() == outcome


def test_ranks_that_exit_with_0_before_the_last_step_have_crashed(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    assert conclude(run, 1, {}).kind is OutcomeKind.CRASH
    assert run.result(1).kind is OutcomeKind.CRASH


def test_an_error_that_is_no_full_disk_is_raised_and_removes_nothing(tmp_path, monkeypatch):
    run = stopped(tiny.recipe(tmp_path), 2)
    unfinished = step_folder(run.checkpoints, 4).with_suffix(".part")
    unfinished.mkdir()

    def refuse(self, outcome):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(RunFolder, "write_result", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        conclude(run, 1, {0: 1})
    assert unfinished.is_dir()


def test_progress_is_that_of_the_outcome_s_own_attempt(tmp_path):
    recipe = tiny.recipe(tmp_path)
    run = tiny.begin(recipe)
    with run.open_metrics(1) as writer:
        writer.write("train", 5, {"loss": 2.0})
    run.write_status(Status(state="running", step=7, steps=10, attempt=1))
    outcome = with_progress(run, Outcome(kind=OutcomeKind.CRASH, step=1, attempt=1))
    assert (outcome.step, outcome.steps, outcome.metrics) == (7, 10, {"loss": 2.0})
    outcome = with_progress(run, Outcome(kind=OutcomeKind.CRASH, step=1, attempt=2))
    assert (outcome.step, outcome.steps, outcome.metrics) == (1, None, {})


def test_an_end_outside_any_attempt_keeps_the_progress_of_the_result_before_it(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    run.write_result(Outcome(kind=OutcomeKind.CRASH, step=7, steps=10, attempt=1, metrics={"loss": 2.0}))
    (run.path / "status.json").unlink()
    outcome = with_progress(run, Outcome(kind=OutcomeKind.CANCELLED, attempt=0))
    assert (outcome.step, outcome.steps, outcome.metrics) == (7, 10, {"loss": 2.0})


@pytest.mark.parametrize("name", ["mine.json", "mine"])
def test_a_run_keeps_a_tokenizer_where_generate_and_export_look(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / name))
    corpus = tiny.corpus(tmp_path)
    data = Files(files=str(corpus / "*.jsonl"), tokenizer=str(tmp_path / name), validation_fraction=0.0)
    recipe = tiny.recipe(tmp_path, data=data, vocab_size=256)
    source.prepare(data, report=lambda line: None)
    run = tiny.begin(recipe)
    keep_tokenizer(run, recipe)
    assert load(run.tokenizer).fingerprint == load(Path(tmp_path / name)).fingerprint
    assert [each.name for each in run.tokenizer.iterdir()] == ["tokenizer.json"]


def test_the_step_of_an_end_is_the_last_that_anybody_knows_of(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    with run.open_metrics(1) as writer:
        writer.write("train", 1, {"loss": 1.0})
    run.write_failure(Outcome(kind=OutcomeKind.HANG, step=12, rank=1, attempt=1, cause="step 13 did not end"))
    assert conclude(run, 1, {1: 71}).step == 12


def test_what_gloo_said_as_it_aborted_a_rank_is_its_cause(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    earlier, words = "  what():  of an earlier attempt", "[enforce fail at pair.cc:456] 49280 vs 24640."
    (run.logs / "rank-1.log").write_text(
        f"{earlier}\nterminate called after\n  what():  {words}\nFatal Python error: Aborted\n"
    )
    (run.logs / "rank-0.log").write_text("nothing of the kind\n")
    assert conclude(run, 1, {1: -signal.SIGABRT}).cause == f"{words} (SIGABRT)"
    assert conclude(run, 1, {0: -signal.SIGABRT}).cause.startswith("aborted by SIGABRT")


def left(run, *, state="running", silent=60.0, host=None, pid=2**22 + 1):
    """A run whose newest attempt has no result, and whose status a process wrote some time ago."""
    values = {} if host is None else {"host": host}
    run.write_status(Status(state=state, step=3, steps=9, attempt=1, pid=pid, updated=time.time() - silent, **values))
    return run


def test_a_result_that_only_the_attempt_has_becomes_the_run_s(tmp_path):
    run = left(tiny.begin(tiny.recipe(tmp_path)))
    run.write_result(Outcome(kind=OutcomeKind.NAN, step=4, attempt=1, cause="the loss is not finite"))
    (run.path / "result.json").unlink()
    run = left(run)
    close_dead(run)
    assert (run.result(), run.status().outcome) == (run.result(1), "nan")


@pytest.mark.parametrize("cause", ["its time is over", "its time is over; the run can be resumed"])
def test_so_does_a_stop_that_came_before_all_were_killed(tmp_path, cause):
    run = left(tiny.begin(tiny.recipe(tmp_path)))
    write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.WALLTIME, cause=cause))
    close_dead(run)
    assert run.result().kind is OutcomeKind.WALLTIME
    assert run.result().cause == "its time is over; it ended before it had saved; the run can be resumed"


@pytest.mark.parametrize(
    "how",
    [
        {"silent": 1.0},
        # The process of rank 0 lives.
        {"pid": 1},
        {"host": "elsewhere", "silent": 3600.0},
    ],
)
def test_as_long_as_a_process_may_be_left_nothing_is_written(tmp_path, how):
    run = left(tiny.begin(tiny.recipe(tmp_path)), **how)
    close_dead(run)
    assert run.result() is None


def test_the_next_attempt_does_not_wait_for_a_status_whose_clock_was_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.launch.attempt._EARLIER_SECONDS", 0.3)
    run = left(tiny.begin(tiny.recipe(tmp_path)), host="elsewhere", silent=-300.0)
    close_earlier(run)
    assert run.result(1).kind is OutcomeKind.CRASH


def test_the_next_attempt_waits_for_ranks_whose_launcher_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.launch.attempt._EARLIER_SECONDS", 0.3)
    process = subprocess.Popen(["sleep", "600"])
    run = left(tiny.begin(tiny.recipe(tmp_path)), pid=process.pid, silent=0.0)
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} still works on it; wait for it, or kill it"):
            close_earlier(run)
    finally:
        process.kill()
        process.wait()
    close_earlier(run)
    assert run.result(1).kind is OutcomeKind.CRASH

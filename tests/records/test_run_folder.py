"""Run folders: made once however many race, readable at any time, never in two hands."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Identity, Outcome, OutcomeKind, RunFolder, Status, create_run, identify, open_run

CONFIG = {"name": "toy", "steps": 3, "optimizer": {"lr": 1e-5}}


def an_identity(**more):
    return identify({"steps": 3, **more}, data="d", hardware="cpu")


def make(runs, **given):
    return create_run(runs, **{"name": "toy", "identity": an_identity(), "config": CONFIG, **given})


def test_a_new_folder_has_everything(tmp_path):
    run = make(tmp_path / "deep" / "runs", sweep="s1")
    assert run.path == tmp_path / "deep" / "runs" / "s1" / f"toy-{an_identity().hash8}"
    assert (run.name, run.hash8, run.sweep) == ("toy", an_identity().hash8, "s1")
    assert sorted(path.name for path in run.path.iterdir()) == [
        "attempts",
        "checkpoints",
        "config.yaml",
        "identity.json",
        "logs",
        "status.json",
        "traces",
    ]
    assert run.config() == CONFIG
    assert run.identity() == an_identity()
    assert run.created() == pytest.approx(time.time(), abs=60)
    assert run.status().state == "prepared"
    assert (run.result(), run.env(), run.attempts(), run.metrics()) == (None, None, [], [])
    assert [path.name for path in run.path.parent.iterdir()] == [run.path.name]


def test_making_it_again_changes_nothing(tmp_path):
    first = make(tmp_path)
    first.begin_attempt(CONFIG, {})
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    again = make(tmp_path, config={"other": 1})
    assert again == first
    assert again.config() == CONFIG
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before


def _make_in_process(runs):
    return str(make(Path(runs)).path)


def test_processes_race_for_one_folder(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = set(pool.map(_make_in_process, [str(tmp_path)] * 30, chunksize=1))
    assert len(paths) == 1
    assert [path.name for path in (tmp_path / "single").iterdir()] == [Path(paths.pop()).name]


def test_threads_race_for_one_folder_and_for_attempts(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: make(tmp_path), range(40)))
        assert len(set(runs)) == 1
        numbers = list(threads.map(lambda run: run.begin_attempt(CONFIG, {}), runs))
    assert sorted(numbers) == list(range(1, 41)) == runs[0].attempts()


def test_a_folder_of_another_run_is_not_taken(tmp_path):
    run = make(tmp_path)
    twin = Identity(sha256=run.hash8 + "0" * 56, content={})
    with pytest.raises(ConfigError, match="belongs to another run"):
        make(tmp_path, identity=twin)


@pytest.mark.parametrize("key", ["name", "sweep"])
@pytest.mark.parametrize("label", ["", "a/b", "..", ".hidden", "a b", "a\n", "-x", "é", "x" * 101])
def test_a_label_that_is_no_folders_name_is_refused(tmp_path, key, label):
    with pytest.raises(ConfigError, match=f"^{key}=") as caught:
        make(tmp_path, **{key: label})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for runs in (tmp_path / "file", tmp_path / "file" / "runs", Path("/proc/titanlab-runs")):
        with pytest.raises(ConfigError, match="^runs=.*cannot be written") as caught:
            make(runs)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == ""


def test_a_folder_with_foreign_files_is_not_overwritten(tmp_path):
    path = tmp_path / "single" / f"toy-{an_identity().hash8}"
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="^runs="):
        make(tmp_path)
    assert [each.name for each in path.parent.rglob("*") if each.is_file()] == ["thesis.txt"]


def test_only_a_runs_folder_opens(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="^run="):
            open_run(path)
    run = make(tmp_path)
    assert open_run(str(run.path)) == run


def test_an_attempt_has_its_own_config_environment_and_result(tmp_path):
    run = make(tmp_path)
    assert run.begin_attempt(CONFIG, {"time": 1}, patch="diff\n") == 1
    assert (run.attempt_folder(1) / "code.patch").read_text() == "diff\n"
    run.write_result(Outcome(kind=OutcomeKind.PREEMPTED, step=2, steps=3))
    assert run.result().kind is OutcomeKind.PREEMPTED
    assert run.status().outcome == "preempted"

    other = {**CONFIG, "parallelism": {"shard": 2}}
    assert run.begin_attempt(other, {"time": 2}) == 2
    # While the second goes on, the first one's end is not the run's.
    assert run.result() is None
    assert (run.status().state, run.status().attempt, run.status().outcome) == ("starting", 2, None)
    run.write_result(Outcome(kind=OutcomeKind.DONE, step=3, steps=3, attempt=2))
    assert (run.config(), run.config(1), run.config(2)) == (CONFIG, CONFIG, other)
    assert (run.env(), run.env(1), run.env(2)) == ({"time": 2}, {"time": 1}, {"time": 2})
    assert [run.result(number).kind for number in (1, 2)] == ["preempted", "done"]
    assert run.result() == run.result(2)


def test_a_wish_to_cancel_outlives_the_beginning_of_an_attempt(tmp_path):
    run = make(tmp_path)
    run.withdraw_cancel()
    run.ask_to_cancel()
    run.begin_attempt(CONFIG, {})
    assert run.asked_to_cancel().startswith("titanlab cancel on ")
    run.withdraw_cancel()
    assert run.asked_to_cancel() is None


def test_the_result_ends_the_status_and_keeps_what_else_it_said(tmp_path):
    run = make(tmp_path)
    run.begin_attempt(CONFIG, {})
    run.write_status(Status(state="running", step=2, steps=3, attempt=1, seconds_left=1.5, metrics={"loss": 2.5}))
    run.write_result(Outcome(kind=OutcomeKind.OOM, step=2))
    status = run.status()
    assert (status.state, status.step, status.steps, status.outcome) == ("ended", 2, 3, "oom")
    assert (status.seconds_left, status.metrics) == (None, {"loss": 2.5})


def test_ranks_note_their_failures(tmp_path):
    run = make(tmp_path)
    run.begin_attempt(CONFIG, {})
    assert run.failures(1) == []
    for rank in (10, 2):
        run.write_failure(Outcome(kind=OutcomeKind.CRASH, rank=rank, cause=f"rank {rank}"))
    assert [failure.rank for failure in run.failures(1)] == [2, 10]
    assert run.result() is None


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_is_named_and_one_that_nothing_depends_on_reads_as_missing(tmp_path, content):
    run = make(tmp_path)
    for name, read in (("status.json", run.status), ("result.json", run.result), ("identity.json", run.identity)):
        (run.path / name).write_text(content)
        with pytest.raises(ConfigError, match=f"^run=.*{name}: "):
            read()
    (run.path / "env.json").write_text(content)
    assert run.env() is None
    # Whoever ends the run needs no status, and writes one.
    assert run.known_status() is None
    run.write_result(Outcome(kind=OutcomeKind.DONE))
    assert (run.status().state, run.result().kind) == ("ended", OutcomeKind.DONE)


def test_metrics_are_the_rows_that_count(tmp_path):
    run = make(tmp_path)
    with run.open_metrics(1) as writer:
        for step in (1, 2, 3):
            writer.write("train", step, {"loss": 1.0})
    with run.open_metrics(2, resumed_step=1) as writer:
        writer.write("train", 2, {"loss": 2.0})
    assert [(row["step"], row["attempt"]) for row in run.metrics("train")] == [(1, 1), (2, 2)]


HOLD = """
import sys
from titanlab.records.run_folder import open_run
with open_run(sys.argv[1]).claim():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_in_one_hand_and_free_when_its_process_dies(tmp_path):
    run = make(tmp_path)
    with run.claim():
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in the hands of process {holder.pid} on "):
            with run.claim():
                pytest.fail("the claim was given twice")
        holder.kill()
    with run.claim():
        assert str(os.getpid()) in (run.path / ".claim").read_text()


def test_a_renamed_folder_still_reads(tmp_path):
    run = make(tmp_path)
    moved = RunFolder(run.path.rename(tmp_path / "kept"))
    assert (moved.name, moved.hash8) == ("kept", "")
    assert open_run(moved.path).config() == CONFIG


def test_the_newest_attempt_is_chosen_unless_another_is_given(tmp_path):
    run = make(tmp_path)
    assert (run.newest_attempt(), run.chosen_attempt(None)) == (0, 0)
    with pytest.raises(ConfigError, match=r"^--attempt=1: the run has no such attempt; known: none; leave it out"):
        run.chosen_attempt(1)
    # Names of folders are numbers: 10 is after 9.
    for _ in range(10):
        run.begin_attempt(CONFIG, {})
    assert (run.newest_attempt(), run.chosen_attempt(None), run.chosen_attempt(2)) == (10, 10, 2)
    with pytest.raises(
        ConfigError, match=r"^--attempt=11: the run has no such attempt; known: 1, 2, .*try --attempt 10"
    ):
        run.chosen_attempt(11)

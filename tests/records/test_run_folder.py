"""Run folders: made once however many race, readable at any time, never in two hands."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Identity, Outcome, OutcomeKind, RunFolder, Status, create_run, identify, open_run
from titanlab.system import FolderGone

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
    moved = RunFolder(run.path.rename(tmp_path / "kept"))
    assert (moved.name, moved.hash8) == ("kept", "")
    assert open_run(moved.path).config() == CONFIG


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
    with run.claim():
        assert run.is_claimed()
        assert str(os.getpid()) in (run.path / ".claim").read_text()
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


@pytest.fixture
def run(tmp_path):
    """A folder without files."""
    path = tmp_path / "sweep" / "small-model-0123abcd"
    path.mkdir(parents=True)
    return RunFolder(path)


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def attempt(run, number, **files):
    run.attempt_folder(number).mkdir(parents=True)
    for name, value in files.items():
        put(run.attempt_folder(number) / f"{name}.json", value)


@pytest.mark.parametrize(
    ("folder", "name", "hash8"),
    [
        ("a-b-0123abcd", "a-b", "0123abcd"),
        ("0123abcd-89abcdef", "0123abcd", "89abcdef"),
        ("mine", "mine", ""),
        ("a-0123ABCD", "a-0123ABCD", ""),
        ("a-0123abc", "a-0123abc", ""),
        ("-0123abcd", "-0123abcd", ""),
    ],
)
def test_the_name_of_a_folder_has_a_label_and_a_hash(folder, name, hash8):
    run = RunFolder(Path("runs") / "sweep" / folder)
    assert (run.name, run.hash8, run.sweep) == (name, hash8, "sweep")


def test_a_folder_without_files_has_no_records(run):
    assert (run.identity(), run.created(), run.parent()) == (None, None, None)
    assert (run.env(), run.env(1), run.status(), run.known_status()) == (None, None, None, None)
    assert (run.result(), run.result(1), run.job(), run.asked_to_cancel()) == (None, None, None, None)
    assert (run.attempts(), run.newest_attempt(), run.restarts(), run.saved_step()) == ([], 0, 0, 0)
    assert (run.failures(1), run.metrics(), run.is_claimed(), run.has_chosen(1)) == ([], [], False, False)
    with pytest.raises(ConfigError):
        run.config()
    (run.path / "attempts").write_text("")
    assert run.attempts() == []


def test_a_folder_that_is_gone_is_not_made_again(tmp_path):
    with pytest.raises(FolderGone):
        RunFolder(tmp_path / "gone").write_result(Outcome(kind=OutcomeKind.OOM))
    assert list(tmp_path.iterdir()) == []


IDENTITY = {"schema": 1, "sha256": "ab" * 32, "content": {"a": 1}, "created": 5.5}
STATUS = {"schema": 1, "state": "running", "pid": 7, "host": "n1", "updated": 3.5}
END = Outcome(
    kind=OutcomeKind.OOM, step=3, steps=9, attempt=2, rank=1, cause="é", exit_code=70, ended=5.0, metrics={"loss": 1.5}
)


RESULT = {"schema": 1, **asdict(END)}


def test_records_come_back_without_the_keys_of_a_later_version(run):
    run.write_result(END)
    status = Status(state="running", step=2, steps=3, attempt=1, seconds_left=1.5, metrics={"loss": 2.5})
    run.write_status(status)
    assert (run.result(), run.result(2), run.status()) == (END, END, status)
    assert (status.pid, status.host, status.outcome) == (os.getpid(), socket.gethostname(), None)
    assert status.updated == pytest.approx(time.time(), abs=60)
    put(run.path / "result.json", RESULT | {"mood": "good"})
    put(run.path / "status.json", STATUS | {"mood": "good"})
    put(run.path / "identity.json", IDENTITY | {"tracker_id": "t", "parent_run": "s/r", "parent_step": 7, "mood": 1})
    assert (run.result(), run.status()) == (END, Status(state="running", pid=7, host="n1", updated=3.5))
    assert run.identity() == Identity(sha256="ab" * 32, content={"a": 1})
    assert (run.created(), run.identity().tracker_id, run.parent()) == (5.5, "t", ("s/r", 7))
    for half in ({}, {"parent_run": "s/r"}, {"parent_step": 7}):
        put(run.path / "identity.json", IDENTITY | half)
        assert (run.parent(), run.identity().tracker_id) == (None, None)


def test_numbers_that_are_not_finite_are_null(run):
    run.write_result(Outcome(kind=OutcomeKind.NAN, metrics={"loss": float("nan")}))
    run.write_status(Status(state="running", metrics={"loss": float("nan")}))
    assert run.result().metrics == run.status().metrics == {"loss": None}
    run.write_status(Status(state="sleeping"))
    with pytest.raises(ConfigError, match="^state=sleeping: invalid enum value 'sleeping' in "):
        run.status()


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("result", {"kind": ...}, "kind=null: is missing in "),
        ("result", {"rank": 0.5}, "rank=0.5: expected `int | null`, got `float` in "),
        ("identity", {"sha256": ...}, "sha256=null: is missing in "),
        ("identity", {"content": []}, "content=[]: expected `object`, got `array` in "),
        ("identity", {"created": "now"}, "created=now: expected `float | null`, got `str` in "),
        ("status", {"state": ...}, "state=null: is missing in "),
        ("status", {"step": True}, "step=true: expected `int`, got `bool` in "),
        ("status", {"outcome": 3}, "outcome=3: expected `str | null`, got `int` in "),
        # What looks for that process read a path with it.
        ("status", {"pid": "a\0"}, "pid="),
        ("status", {"host": ["a"]}, "host="),
    ],
)
def test_a_damaged_record_is_one_line(run, file, changed, said):
    content = {"result": RESULT, "identity": IDENTITY, "status": STATUS}[file] | changed
    put(run.path / f"{file}.json", {key: value for key, value in content.items() if value is not ...})
    with pytest.raises(ConfigError) as caught:
        getattr(run, file)()
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    if file == "status" and "schema" not in changed:
        cure = "remove that file: it is written anew when the run goes on"
        assert str(caught.value).endswith(f"{run.path / 'status.json'}; {cure}")


def test_attempts_are_numbers_and_one_is_chosen_or_the_newest(run):
    assert run.chosen_attempt(None) == 0
    with pytest.raises(ConfigError) as caught:
        run.chosen_attempt(1)
    assert str(caught.value) == "--attempt=1: the run has no such attempt; known: none; leave it out"
    for name in ("10", "2", "1", "x", "-3", "1.5", "", "9" * 20, "٣"):
        (run.path / "attempts" / name).mkdir(parents=True, exist_ok=True)
    assert run.attempts() == [1, 2, 10]
    assert (run.newest_attempt(), run.chosen_attempt(None), run.chosen_attempt(1)) == (10, 10, 1)
    with pytest.raises(ConfigError) as caught:
        run.chosen_attempt(3)
    assert str(caught.value) == "--attempt=3: the run has no such attempt; known: 1, 2, 10; try --attempt 10"


def test_records_of_an_attempt_are_its_own(run):
    put(run.path / "env.json", {"time": 2})
    attempt(run, 1, env={"time": 1}, job={"id": "a"}, saved={"step": 9})
    attempt(run, 2, env={"time": 2}, job={"id": "b"}, restart={}, saved={"step": 8})
    assert (run.env(), run.env(1), run.env(3)) == ({"time": 2}, {"time": 1}, None)
    assert (run.job(), run.job(1), run.job(3)) == ({"id": "b"}, {"id": "a"}, None)
    assert (run.restarts(), run.saved_step()) == (1, 8)
    attempt(run, 3, saved="{", chosen={})
    attempt(run, 4, saved={"step": "11"})
    assert run.saved_step() == 8
    assert (run.has_chosen(2), run.has_chosen(3)) == (False, True)
    put(run.attempt_folder(1) / "config.yaml", "a: 1\n")
    assert run.config(1) == {"a": 1}


def test_failures_of_ranks_are_sorted_and_damaged_ones_left_out(run):
    for rank in (10, 2):
        run.write_failure(Outcome(kind=OutcomeKind.OOM, rank=rank, ended=1.0))
    put(run.attempt_folder(1) / "failures" / "rank-3.json", "{")
    put(run.attempt_folder(1) / "failures" / "other.json", "{}")
    assert [failure.rank for failure in run.failures(1)] == [2, 10]
    assert (run.failures(2), run.result()) == ([], None)


def test_a_section_of_the_recipe_is_a_mapping(run):
    put(run.path / "config.yaml", "name: a\nempty: null\ncheckpoint:\n  keep: 2\ndata: [1]\n")
    assert run.section("checkpoint") == {"keep": 2}
    assert run.section("empty") == run.section("gone") == {}
    with pytest.raises(ConfigError, match=r"^data=\[1\]: is not a mapping in .*config.yaml; restore that file"):
        run.section("data")

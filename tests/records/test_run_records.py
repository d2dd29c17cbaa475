"""Records of a run: what each file says, what a missing or damaged one means, and names of folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Identity, Outcome, OutcomeKind, RunFolder


@pytest.fixture
def run(tmp_path):
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


def test_places_are_below_the_folder(run):
    assert [run.logs.name, run.checkpoints.name, run.tokenizer.name, run.traces.name] == [
        "logs", "checkpoints", "tokenizer", "traces",
    ]  # fmt: skip
    assert run.attempt_folder(3) == run.path / "attempts" / "3"


@pytest.mark.parametrize(
    ("folder", "name", "hash8"),
    [
        ("a-0123abcd", "a", "0123abcd"),
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
    assert (run.identity(), run.created(), run.tracker_id(), run.parent()) == (None, None, None, None)
    assert (run.env(), run.env(1), run.status(), run.known_status()) == (None, None, None, None)
    assert (run.result(), run.result(1), run.job(), run.asked_to_cancel()) == (None, None, None, None)
    assert (run.attempts(), run.newest_attempt(), run.restarts(), run.saved_step()) == ([], 0, 0, 0)
    assert (run.failures(1), run.metrics(), run.is_claimed(), run.has_chosen(1)) == ([], [], False, False)
    with pytest.raises(ConfigError):
        run.config()


IDENTITY = {"schema": 1, "sha256": "ab" * 32, "content": {"a": 1}, "created": 5.5}


def test_an_identity_is_read(run):
    put(run.path / "identity.json", IDENTITY | {"tracker_id": "t", "parent_run": "s/r", "parent_step": 7})
    assert run.identity() == Identity(sha256="ab" * 32, content={"a": 1})
    assert (run.created(), run.tracker_id(), run.parent()) == (5.5, "t", ("s/r", 7))


@pytest.mark.parametrize("more", [{}, {"parent_run": "s/r"}, {"parent_step": 7}])
def test_a_run_that_began_from_none_has_no_parent(run, more):
    put(run.path / "identity.json", IDENTITY | more)
    assert (run.parent(), run.tracker_id()) == (None, None)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"sha256": 5}, "sha256=5: expected `str`, got `int` in "),
        ({"sha256": ...}, "sha256=null: is missing in "),
        ({"content": ...}, "content=null: is missing in "),
        ({"content": []}, "content=[]: expected `object`, got `array` in "),
        ({"created": "now"}, "created=now: expected `float | null`, got `str` in "),
        ({"schema": 9}, "schema=9: "),
    ],
)
def test_a_damaged_identity_is_one_line(run, value, said):
    content = {key: each for key, each in (IDENTITY | value).items() if each is not ...}
    put(run.path / "identity.json", content)
    for ask in (run.identity, run.created, run.tracker_id, run.parent):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert said in str(caught.value)


def test_a_damaged_status_is_known_to_be_none(run):
    put(run.path / "status.json", "{")
    assert run.known_status() is None
    with pytest.raises(ConfigError):
        run.status()


def test_attempts_are_numbers(run):
    for name in ("10", "2", "1", "x", "-3", "1.5", "", "9" * 20, "٣"):
        (run.path / "attempts" / name).mkdir(parents=True, exist_ok=True)
    assert run.attempts() == [1, 2, 10]
    assert run.newest_attempt() == 10


def test_a_file_in_the_place_of_the_attempts_is_none(run):
    (run.path / "attempts").write_text("")
    assert run.attempts() == []


def test_an_attempt_is_chosen_or_the_newest(run):
    assert run.chosen_attempt(None) == 0
    with pytest.raises(ConfigError) as caught:
        run.chosen_attempt(1)
    assert str(caught.value) == "--attempt=1: the run has no such attempt; known: none; leave it out"
    attempt(run, 1)
    attempt(run, 3)
    assert (run.chosen_attempt(None), run.chosen_attempt(1)) == (3, 1)
    with pytest.raises(ConfigError) as caught:
        run.chosen_attempt(2)
    assert str(caught.value) == "--attempt=2: the run has no such attempt; known: 1, 3; try --attempt 3"


def test_records_of_an_attempt_are_its_own(run):
    put(run.path / "env.json", {"time": 2})
    attempt(run, 1, env={"time": 1}, job={"id": "a"})
    attempt(run, 2, env={"time": 2}, job={"id": "b"}, restart={})
    assert (run.env(), run.env(1), run.env(3)) == ({"time": 2}, {"time": 1}, None)
    assert (run.job(), run.job(1), run.job(3)) == ({"id": "b"}, {"id": "a"}, None)
    assert run.restarts() == 1
    put(run.attempt_folder(2) / "chosen.json", {})
    assert (run.has_chosen(1), run.has_chosen(2)) == (False, True)


@pytest.mark.parametrize("damaged", ["text", 7, ["a"], True, None])
def test_a_section_of_the_environment_that_is_no_mapping_is_missing(tmp_path, damaged):
    """Tables and reports read names below it."""
    run = RunFolder(tmp_path / "run")
    for name in ("code", "packages", "host", "environment"):
        put(run.path / "env.json", {name: damaged, "time": 1})
        assert run.env() == {"time": 1}
    put(run.path / "env.json", {"code": {"version": "1", "git": damaged}})
    assert run.env() == {"code": {"version": "1"}}
    whole = {"code": {"version": "1", "git": {"sha": "a"}}, "host": {"name": "b"}, "argv": ["c"]}
    put(run.path / "env.json", whole)
    assert run.env() == whole


def test_the_last_saved_step_is_that_of_the_newest_attempt_that_saved(run):
    attempt(run, 1, saved={"step": 5})
    attempt(run, 2, saved={"step": 9})
    attempt(run, 3)
    attempt(run, 4, saved="{")
    attempt(run, 5, saved={"step": "11"})
    assert run.saved_step() == 9


def test_ends_are_read(run):
    first, last = Outcome(kind=OutcomeKind.CRASH, ended=1.0), Outcome(kind=OutcomeKind.DONE, attempt=2, ended=2.0)
    run.write_result(first)
    run.write_result(last)
    assert (run.result(), run.result(1), run.result(2), run.result(3)) == (last, first, last, None)


def test_failures_of_ranks_are_sorted_and_damaged_ones_left_out(run):
    for rank in (10, 2):
        outcome = Outcome(kind=OutcomeKind.OOM, rank=rank, ended=1.0)
        run.write_failure(outcome)
    put(run.attempt_folder(1) / "failures" / "rank-3.json", "{")
    put(run.attempt_folder(1) / "failures" / "other.json", "{}")
    assert [failure.rank for failure in run.failures(1)] == [2, 10]
    assert run.failures(2) == []


def test_the_user_who_cancels_is_named(run):
    put(run.path / "cancel.json", {"by": "eve"})
    assert run.asked_to_cancel() == "eve"
    put(run.path / "cancel.json", {})
    assert run.asked_to_cancel() == "None"
    put(run.path / "cancel.json", "{")
    assert run.asked_to_cancel() is None


def test_all_files_that_a_run_needs_are_checked(run):
    put(run.path / "config.yaml", "training:\n  steps: 5\n")
    assert run.config() == {"training": {"steps": 5}}
    run.check_files()
    for name in ("identity.json", "status.json", "result.json"):
        put(run.path / name, "[]")
        with pytest.raises(ConfigError):
            run.check_files()
        (run.path / name).unlink()
    attempt(run, 1)
    put(run.attempt_folder(1) / "config.yaml", "a: 1\n")
    assert run.config(1) == {"a": 1}


def test_a_section_of_the_recipe_is_a_mapping(run):
    put(run.path / "config.yaml", "name: a\nempty: null\ncheckpoint:\n  keep: 2\ndata: [1]\n")
    assert run.section("checkpoint") == {"keep": 2}
    assert run.section("empty") == run.section("gone") == {}
    with pytest.raises(ConfigError, match=r"^data=\[1\]: is no mapping in .*config.yaml; restore that file"):
        run.section("data")

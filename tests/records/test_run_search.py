"""Finding the run that a person means."""

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Identity, NoSuchRun, create_run, find_run, list_runs


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    for sweep, name, digits in (
        ("single", "toy", "abcd1111"),
        ("single", "toy", "abcd2222"),
        ("single", "quickstart", "12345678"),
        ("s1", "large", "99990000"),
        ("s2", "large-2", "99990000"),
    ):
        create_run(
            folder, sweep=sweep, name=name, identity=Identity(sha256=digits + "e" * 56, content={}), config={"a": 1}
        )
    return folder


def test_all_runs_by_path_and_by_sweep(runs, tmp_path):
    (runs / "single" / ".toy-x.1.part").mkdir()
    (runs / "single" / ".toy-x.1.part" / "config.yaml").write_text("a: 1")
    (runs / "single" / "notes").mkdir()
    (runs / "readme.txt").write_text("")
    names = [f"{run.sweep}/{run.path.name}" for run in list_runs(runs)]
    assert names == [
        "s1/large-99990000",
        "s2/large-2-99990000",
        "single/quickstart-12345678",
        "single/toy-abcd1111",
        "single/toy-abcd2222",
    ]
    assert len(list_runs(runs, "single")) == 3
    assert list_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("toy-abcd1111", "single/toy-abcd1111"),
        ("single/toy-abcd1111", "single/toy-abcd1111"),
        ("single/toy-abcd1111/", "single/toy-abcd1111"),
        ("quickstart", "single/quickstart-12345678"),
        ("large", "s1/large-99990000"),
        ("abcd1", "single/toy-abcd1111"),
        ("ABCD2222", "single/toy-abcd2222"),
        ("12345678" + "e" * 56, "single/quickstart-12345678"),
        ("12345678ee", "single/quickstart-12345678"),
    ],
)
def test_a_run_by_what_a_person_types(runs, text, found):
    assert find_run(text, runs).path == runs / found


def test_a_run_by_its_path(runs, monkeypatch):
    monkeypatch.chdir(runs / "single" / "toy-abcd1111")
    assert find_run(str(runs / "s1" / "large-99990000"), "nowhere").sweep == "s1"
    assert find_run(".", "nowhere").config() == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("toy", "fits 2 runs .*single/toy-abcd1111 or single/toy-abcd2222"),
        ("abcd", "fits 2 runs"),
        ("99990000", "fits 2 runs .*s1/large-99990000 or s2/large-2-99990000"),
        ("quickstrat", "fits no run .*try single/quickstart-12345678"),
        ("12345678ff", "fits no run"),
        ("abc", "fits no run"),
        ("", "fits no run"),
    ],
)
def test_no_run_or_several_are_an_error_that_helps(runs, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_run(text, runs)
    assert str(caught.value).startswith("run=")
    assert isinstance(caught.value, NoSuchRun) == message.startswith("fits no run")


def test_without_any_run_the_error_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="train one first"):
        find_run("toy", tmp_path / "runs")

"""Finding the run that a person means, and the points of a sweep."""

import json

import pytest

from titanlab.errors import ConfigError
from titanlab.records import Identity, NoSuchRun, RunFolder, create_run, find_run, list_runs, point_of, read_points


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


def write(folder, text):
    (folder / "points.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())


def test_without_a_file_there_is_no_point(tmp_path):
    assert read_points(tmp_path) == []
    assert read_points(tmp_path / "gone") == []
    write(tmp_path, "")
    assert read_points(tmp_path) == []
    # A file in place of the sweep's folder.
    assert read_points(tmp_path / "points.jsonl") == []


def test_lines_keep_their_order_and_empty_ones_are_skipped(tmp_path):
    lines = [
        {"point": {"seed": 2}, "run": "b"},
        {"run": None, "dropped": {"stage": "rule"}},
        {"point": {"ä": "\u2028"}},
    ]
    expected = [lines[0], {**lines[1], "point": {}}, lines[2]]
    write(tmp_path, "\n".join(map(json.dumps, lines)).replace("\n", "\r\n\n"))
    assert read_points(tmp_path) == expected
    # A separator of Unicode in a text ends no line.
    write(tmp_path, "\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert read_points(tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ("[]", "line 2 is no point of a sweep"),
        ('{"point": []}', "line 2 is no point of a sweep"),
        ('{"run": 3}', "line 2 is no point of a sweep"),
        ('{"dropped": "rule"}', "line 2 is no point of a sweep"),
        (b"\xff", "is no text in UTF-8"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, rule):
    (tmp_path / "run").mkdir()
    write(tmp_path, b'{"run": "run"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ConfigError) as caught:
        read_points(tmp_path)
    assert str(caught.value).startswith(f"sweep={tmp_path / 'points.jsonl'}: {rule}; restore that file, or submit")
    assert point_of(RunFolder(tmp_path / "run")) == {}

"""Submissions: their files, the names of their jobs, and what is skipped because titanlab has not written it."""

import json

import pytest

from titanlab.launch import JobShape, Submission, submissions, write_submission
from titanlab.launch.submission import job_name, submission_file, token_of
from titanlab.records import read_optional

SHAPE = JobShape(processes=8, nodes=2, tasks_per_node=4, memory_gib=1.5)


def submission(token="aa", created=1.0, runs=("one", "two"), **given):
    given = {"launcher": "slurm", "code": "code/1", "folder": "/home", "shape": SHAPE, "launch": {}, **given}
    return Submission(token=token, created=created, runs=runs, **given)


@pytest.fixture
def sweep(tmp_path):
    return tmp_path


def change(sweep, **changes):
    """Replace keys of the submission's file; None removes one."""
    path = submission_file(sweep, "aa")
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


# Files


def test_a_submission_is_read_as_it_was_written(sweep):
    whole = submission(
        state="submitted",
        job_id="12",
        launch={"kind": "slurm", "environment": {"A": "1"}},
        changes={"one": {"world": 4}},
        batch="b1",
        places=(1, 0),
    )
    write_submission(sweep, whole)
    assert submissions(sweep) == [whole]
    assert submission_file(sweep, "aa") == sweep / "submissions" / "aa.json"
    assert json.loads(submission_file(sweep, "aa").read_text())["schema"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": ["../../elsewhere"]},
        {"runs": [3]},
        {"job_id": "--user=me"},
        {"shape": 3},
        {"created": "x"},
        {"runs": [".hidden"]},
        {"runs": ["a/b"]},
        {"runs": [""]},
        {"launcher": None},
        {"token": None},
        {"token": "../../elsewhere"},
        {"token": "--user=me"},
        {"schema": 2},
        {"places": [0]},
        {"places": [0, "x"]},
        {"shape": {}},
    ],
    ids=str,
)
def test_names_of_a_submission_are_no_paths_and_no_flags(sweep, changes):
    write_submission(sweep, submission())
    assert len(submissions(sweep)) == 1
    change(sweep, **changes)
    assert submissions(sweep) == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": 1, "tok', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_does_not_hide_the_others(sweep, content):
    write_submission(sweep, whole := submission())
    (sweep / "submissions" / "torn.json").write_bytes(content)
    (sweep / "submissions" / "note.txt").write_bytes(content)
    assert submissions(sweep) == [whole]
    assert read_optional(sweep / "submissions" / "torn.json") is None


def test_keys_of_other_versions_are_left_out_and_missing_ones_have_their_default(sweep):
    write_submission(sweep, submission())
    change(
        sweep,
        later="x",
        batch=None,
        places=None,
        changes=None,
        state=None,
        shape={"processes": 1, "tasks_per_node": 1, "later": 2},
    )
    (read,) = submissions(sweep)
    assert (read.batch, read.places, read.changes, read.state) == ("", (), {}, "intent")
    assert read.shape == JobShape(processes=1, tasks_per_node=1)


# What jobs are called and run


def test_a_job_is_called_by_its_sweep_and_run_and_found_by_its_token():
    assert job_name("layouts", "fsdp-0123abcd", "aa11") == "layouts/fsdp-0123abcd-aa11"
    assert job_name("layouts", None, "aa11") == "layouts-aa11"
    # A folder that somebody has renamed: squeue's lists of names end at commas, and its own columns at bars.
    assert job_name("a,b|c d'e", "ü", "aa11") == "a_b_c_d_e/_-aa11"
    assert len(job_name("s" * 300, "r" * 300, "0123456789")) < 255
    # As earlier versions called them.
    assert token_of("titanlab-aa11") == token_of("layouts/fsdp-0123abcd-aa11") == "aa11"

"""Whether there is work for a sweep's supervisor, with which code it starts, and what becomes of one that cannot."""

import os
import sys
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from titanlab.launch import local as supervising
from titanlab.launch import write_submission
from titanlab.launch.local import LOCK, LOG, jobs_in_order, last_error, wake
from titanlab.records import OutcomeKind, RunFolder, claimed


def local(token="aa", *runs, created=1.0):
    return submission(token, runs=runs or ("one",), launcher="local", created=created)


def test_only_submissions_to_this_launcher_count(tmp_path):
    for each in (local("bb", created=2.0), local("aa"), submission("cc")):
        write_submission(tmp_path, each)
    assert [job.key for job in jobs_in_order(tmp_path)] == [("aa", 0), ("bb", 0)]
    assert jobs_in_order(tmp_path / "none") == []


def test_jobs_of_another_launcher_are_no_work(tmp_path):
    write_submission(tmp_path, submission())
    assert not wake(tmp_path)


def test_jobs_that_run_need_no_supervisor(tmp_path):
    write_submission(tmp_path, local())
    (tmp_path / "one").mkdir()
    with RunFolder(tmp_path / "one").claim():
        assert not wake(tmp_path)


def test_a_supervisor_that_runs_reads_new_submissions_itself(tmp_path):
    write_submission(tmp_path, local())
    (tmp_path / "one").mkdir()
    with claimed(tmp_path, "sweep", file=LOCK):
        assert not wake(tmp_path)
    assert not (tmp_path / "jobs").exists()


def test_the_jobs_of_a_supervisor_that_cannot_start_have_failed(tmp_path, monkeypatch):
    real = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "deleted" / "python"))
    write_submission(tmp_path, local())
    (tmp_path / "one").mkdir()
    assert wake(tmp_path)
    result = RunFolder(tmp_path / "one").result()
    assert (result.kind, result.attempt) == (OutcomeKind.CRASH, 0)
    assert result.cause.startswith("could not be started: the sweep's supervisor has ended; supervisor.log ends with: ")
    assert str(tmp_path / "deleted" / "python") in result.cause
    assert not wake(tmp_path)
    # What is submitted later is tried again, and its code may be damaged.
    monkeypatch.setattr(sys, "executable", real)
    (tmp_path / "code" / "titanlab").mkdir(parents=True)
    (tmp_path / "code" / "titanlab" / "__init__.py").write_text("raise ImportError('no x')\n")
    (tmp_path / "two").mkdir()
    write_submission(tmp_path, local("bb", "two", created=2.0))
    assert wake(tmp_path)
    assert RunFolder(tmp_path / "two").result().cause.endswith("ends with: ImportError: no x")
    assert len((tmp_path / "jobs" / LOG).read_text().splitlines()) > 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", None),
        ("KeyError: of an earlier day\n2026-11-26 09:20:40  supervisor 2374 of small\n", None),
        ("2026-11-26 09:20:40  supervisor 2374 of small\nImportError: no x\n\n", "ImportError: no x"),
    ],
)
def test_an_error_is_what_the_supervisor_did_not_write(tmp_path, text, error):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / LOG).write_text(text)
    assert last_error(tmp_path) == error


@pytest.mark.parametrize(
    ("inherited", "others"),
    [
        (None, []),
        ("", []),
        ("/mine:/other", ["/mine", "/other"]),
        (":/mine:", ["/mine"]),
        # Snapshots of earlier submissions of this sweep must not be found after the newest.
        ("{sweep}/code/older:/mine", ["/mine"]),
        ("{sweep}/codex:{sweep}/code", ["{sweep}/codex", "{sweep}/code"]),
    ],
)
def test_the_snapshot_is_before_the_users_own_modules(tmp_path, monkeypatch, inherited, others):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited is not None:
        monkeypatch.setenv("PYTHONPATH", inherited.format(sweep=tmp_path))
    environment = supervising._environment(tmp_path, replace(local(), code="code/1"))
    paths = [f"{tmp_path}/code/1", *(each.format(sweep=tmp_path) for each in others)]
    assert (environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == (os.pathsep.join(paths), "1")

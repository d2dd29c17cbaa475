"""Before a job trains: its code is the submitted one, and nobody else works on its run."""

import contextlib
import re
from pathlib import Path

import pytest

import titanlab
from tests import tiny
from titanlab.errors import ConfigError
from titanlab.launch.job import Job, claim_run
from titanlab.records import RunFolder

HERE = Path(titanlab.__file__).parent


def check_code(code):
    Job(run=RunFolder(code), place=None, token="aa", index=0, code=code).check_code()


def test_the_code_may_be_reached_by_another_path(tmp_path):
    check_code(HERE.parent)
    (tmp_path / "code").symlink_to(HERE.parent)
    check_code(tmp_path / "code")


@pytest.mark.parametrize("name", ["none", "empty", "copy"])
def test_other_code_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "copy" / "titanlab").mkdir(parents=True)
    told = f"titanlab={HERE}: is not the code of this job, {tmp_path / name}: PYTHONPATH was lost or changed"
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_code(tmp_path / name)


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path / "runs"))


def test_a_run_is_claimed_until_the_stack_closes(run):
    with contextlib.ExitStack() as stack:
        assert claim_run(run, stack, seconds=0.0, is_ending=lambda: False) is None
        assert run.is_claimed()
    assert not run.is_claimed()


@pytest.mark.parametrize(("seconds", "ending"), [(0.0, False), (100.0, True)])
def test_who_has_the_run_is_told_when_waiting_is_over(run, monkeypatch, seconds, ending):
    monkeypatch.setattr("titanlab.launch.job._LOOK_SECONDS", 0.0)
    with run.claim(), contextlib.ExitStack() as stack:
        told = claim_run(run, stack, seconds=seconds, is_ending=lambda: ending)
        assert re.fullmatch(r"is in the hands of process \d+ on .+", told)
    assert not run.is_claimed()


def test_a_run_that_becomes_free_is_claimed(run, monkeypatch):
    monkeypatch.setattr("titanlab.launch.job._LOOK_SECONDS", 0.0)
    with contextlib.ExitStack() as other, contextlib.ExitStack() as stack:
        other.enter_context(run.claim())
        looks = []

        def is_ending():
            looks.append(run.is_claimed())
            other.close()
            return False

        assert claim_run(run, stack, seconds=100.0, is_ending=is_ending) is None
        assert looks == [True]
        assert run.is_claimed()

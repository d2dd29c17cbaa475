"""Data that many points share is checked, prepared and fingerprinted once for each data."""

import dataclasses

import pytest

from tests import tiny
from titanlab.data.schema import Files
from titanlab.errors import ConfigError
from titanlab.sweep import plan
from titanlab.sweep.plan import DataOnce, Unfit


@pytest.fixture
def asked(monkeypatch):
    """What was asked of the real functions, in order; a check fails where `asked.refuse` says so."""

    class Asked(list):
        refuse = staticmethod(lambda recipe: None)

    calls = Asked()

    def check(recipe):
        calls.append(("check", recipe.data.files))
        if (error := calls.refuse(recipe)) is not None:
            raise error

    def prepare(data, report):
        calls.append(("prepare", data.files))
        report(f"preparing {data.files}")

    monkeypatch.setattr(plan, "check_data", check)
    monkeypatch.setattr(plan.source, "prepare", prepare)
    monkeypatch.setattr(plan.source, "fingerprint", lambda data: calls.append(("fingerprint", data.files)) or "f")
    return calls


def recipe(tmp_path, files, **given):
    return dataclasses.replace(tiny.recipe(tmp_path, **given), data=Files(files=files))


def quiet(text):
    pass


def test_equal_data_is_asked_about_once_for_all_layouts(tmp_path, asked):
    data = DataOnce()
    for shard in (1, 2, 4):
        for _ in range(2):
            made = recipe(tmp_path, "/a", shard=shard)
            data.prepare(made, quiet)
            data.identify(made)
    # The number of shares of a batch decides whether a corpus is large enough.
    assert asked == [("prepare", "/a"), ("check", "/a"), ("fingerprint", "/a"), ("check", "/a"), ("check", "/a")]


def test_data_is_checked_again_when_it_has_been_prepared_whatever_else_was(tmp_path, asked):
    first, second = recipe(tmp_path, "/a"), recipe(tmp_path, "/b")
    data = DataOnce()
    data.check(second)
    data.prepare(first, quiet)
    data.check(second)
    asked.clear()
    # Only now there is something of it in which the rule can be broken.
    asked.refuse = lambda made: ConfigError("data.files", made.data.files, "is too small", "give more")
    with pytest.raises(Unfit, match="is too small"):
        data.prepare(second, quiet)
    assert asked == [("prepare", "/b"), ("check", "/b")]


def test_an_error_is_remembered_too(tmp_path, asked):
    asked.refuse = lambda made: ConfigError("data.files", made.data.files, "is too small", "give more")
    data = DataOnce()
    for _ in range(2):
        with pytest.raises(ConfigError, match="is too small"):
            data.check(recipe(tmp_path, "/a"))
    assert asked == [("check", "/a")]


@pytest.mark.parametrize(("key", "passes"), [("data.files", True), ("init_from", True), ("training.seq_len", False)])
def test_what_is_not_here_may_be_where_the_runs_are(tmp_path, asked, monkeypatch, key, passes):
    error = ConfigError(key, "a", "is not here", "move it")
    asked.refuse = lambda made: error

    def fails(data):
        raise error

    monkeypatch.setattr(plan.source, "fingerprint", fails)
    made = recipe(tmp_path, "/a")
    for act in (DataOnce(elsewhere=True).check, DataOnce(elsewhere=True).identify):
        if passes:
            act(made)
        else:
            with pytest.raises(ConfigError, match="is not here"):
                act(made)
    with pytest.raises(ConfigError, match="is not here"):
        DataOnce().check(made)

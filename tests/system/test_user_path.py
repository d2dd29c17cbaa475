"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

import titanlab
from titanlab.errors import ConfigError
from titanlab.recipe import read_flags
from titanlab.records import check_runs
from titanlab.sweep import cached
from titanlab.system import home, user_path
from titanlab.techniques.tracker.wandb import has_key


def test_a_tilde_is_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~") == tmp_path
    assert user_path(Path("~/runs")) == tmp_path / "runs"
    assert user_path("a/~/b") == Path("a/~/b")
    assert user_path("") == Path()


def test_the_home_of_nobody_stays_as_it_is():
    assert user_path("~nobody99/runs") == Path("~nobody99/runs")


def test_runs_are_not_written_into_a_folder_that_is_named_like_a_home():
    with pytest.raises(ConfigError, match=r"^runs=~nobody99/runs: ~nobody99 is no user of this host; "):
        check_runs("~nobody99/runs")
    for good in (".", "~", "runs/~nobody99"):
        check_runs(good)


def test_no_module_expands_a_path_that_can_raise():
    package = Path(titanlab.__file__).parent
    files = [path for path in package.rglob("*.py") if ".expanduser()" in path.read_text()]
    assert [str(path.relative_to(package)) for path in files] == []


def test_a_user_may_have_no_home(monkeypatch):
    monkeypatch.setenv("HOME", "/a/home")
    assert home() == Path("/a/home")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", _nobody)
    assert home() is None
    # Who looks into the home folder goes on without one.
    for name in ("TITANLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert all(item.kind != "data-cache" for item in cached())
    assert not has_key({})
    assert read_flags(["runs=~/x"]).overrides == ["runs=~/x"]


def _nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

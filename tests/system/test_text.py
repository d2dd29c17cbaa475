"""Numbers, paths and text of others, as people read them."""

from __future__ import annotations

import shlex
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import titanlab
from titanlab.checkpoint import StorePath
from titanlab.errors import ConfigError
from titanlab.recipe import read_flags
from titanlab.records import check_runs
from titanlab.system import (
    counted,
    duration,
    grouped,
    harmless,
    home,
    short,
    short_span,
    shown_path,
    significant,
    sweep_argument,
    trimmed,
    user_path,
)
from titanlab.system.text import rate
from titanlab.techniques.tracker.wandb import has_key


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (grouped(8030261248), "8,030,261,248"),
        (grouped(float("nan")), "nan"),
        (counted(1, "run"), "1 run"),
        (counted(1234, "run"), "1,234 runs"),
        (counted(0, "process", "processes"), "0 processes"),
        (trimmed(0.5), "0.5"),
        (trimmed(1800), "1800"),
        (trimmed(0.001), "0.001"),
        (trimmed(2.5e-9), "2.50e-09"),
        (short(512), "512"),
        (short(1000), "1.00K"),
        (short(999_999), "1.00M"),
        (short(8_030_261_248), "8.03B"),
        (short(-1500), "-1.50K"),
        (short(12.345), "12.3"),
        (short(5e21), "5000E"),
        (short(float("inf")), "inf"),
        (significant(0.012345), "0.0123"),
        (significant(99.96), "100"),
        (significant(0), "0"),
        (significant(1e-6), "0.00000100"),
        (significant(9_999_999), "1.00e+07"),
        (significant(1.797e308), "1.80e+308"),
        (significant(float("nan")), "nan"),
        (duration(0), "0:00"),
        (duration(7.4), "0:07"),
        (duration(3599.6), "1:00:00"),
        (duration(3 * 86400 + 4 * 3600 + 5 * 60 + 6), "3d 4:05:06"),
        (duration(-1), "0:00"),
        (duration(float("inf")), "?"),
        (short_span(0), "0 µs"),
        (short_span(0.0123), "12.3 ms"),
        (short_span(0.9996), "1.00 s"),
        (short_span(0.0009996), "1.00 ms"),
        (short_span(float("nan")), "?"),
        (rate(3e-4), "3.00e-04"),
    ],
)
def test_forms(shown, expected):
    assert shown == expected


@given(st.floats(1e-12, 1e15))
def test_significant_digits_keep_the_value(value):
    assert float(significant(value, 4)) == pytest.approx(value, rel=5.1e-4)


@given(st.floats(1, 1e17))
def test_a_short_count_is_short_and_near(value):
    text = short(value)
    assert len(text) <= 5
    factor = 1000 ** "KMBTP".find(text[-1]) * 1000 if text[-1].isalpha() else 1
    assert float(text.rstrip("KMBTP")) * factor == pytest.approx(value, rel=5.1e-3)


def test_a_path_is_shown_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here" / "runs") == "runs"
    assert shown_path(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")
    # The current folder's name is the real one, whatever link led to it.
    assert (tmp_path / "here" / shown_path(tmp_path / "link" / "runs")).resolve() == tmp_path / "here" / "runs"


def test_an_address_of_a_store_is_shown_as_it_is():
    assert shown_path(StorePath("memory://bucket/run")) == "memory://bucket/run"


def test_a_sweep_is_named_so_that_a_command_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep_argument(Path("runs/mine")) == sweep_argument(tmp_path / "runs" / "mine") == "mine"
    assert sweep_argument(tmp_path / "other runs" / "mine") == "'other runs/mine'"
    assert sweep_argument(Path("mine")) == "./mine"
    (elsewhere,) = shlex.split(sweep_argument(tmp_path.parent / "mine"))
    assert Path(elsewhere) == tmp_path.parent / "mine"


def test_a_tilde_is_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~") == tmp_path
    assert user_path(Path("~/runs")) == tmp_path / "runs"
    assert user_path("a/~/b") == Path("a/~/b")
    assert user_path("") == Path()


def test_the_home_of_nobody_stays_as_it_is():
    assert user_path("~nobody99/runs") == Path("~nobody99/runs")


def test_runs_are_not_written_into_a_folder_that_is_named_like_a_home():
    with pytest.raises(ConfigError, match=r"^runs=~nobody99/runs: ~nobody99 is not a user of this host; "):
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
    assert not has_key({})
    assert read_flags(["runs=~/x"]).overrides == ["runs=~/x"]


def _nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain text, 100 %", "plain text, 100 %"),
        ("a\ttab stays", "a\ttab stays"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H", "^[[2J^[[H"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("50%\r100%\r", "50%^M100%"),
        ("\x9b31m", "\\u009b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("über · 語", "über · 語"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_shown_and_do_nothing(line, shown):
    assert harmless(line) == shown

"""Which files pytest's workers run together."""

from types import SimpleNamespace

import pytest

from tests.workers import RanksTogether, starts_ranks

RANKS = "def test_of_ranks(pool): pass\n"
OTHERS = "def test_of_none(tmp_path): pass\n"


@pytest.fixture
def scheduler(tmp_path):
    for number in range(5):
        (tmp_path / f"test_ranks_{number}.py").write_text(RANKS)
        (tmp_path / f"test_others_{number}.py").write_text(OTHERS)
    made = RanksTogether.__new__(RanksTogether)
    made.config, made._units = SimpleNamespace(rootpath=tmp_path), {}
    return made


def test_files_with_tests_of_ranks_are_two_units(scheduler):
    units = [scheduler._split_scope(f"test_ranks_{number}.py::test_of_ranks") for number in range(5)]
    assert units == ["ranks 0", "ranks 1", "ranks 0", "ranks 1", "ranks 0"]
    # xdist asks again when a test has ended.
    assert scheduler._split_scope("test_ranks_1.py::test_of_ranks") == "ranks 1"


def test_every_other_file_is_a_unit(scheduler):
    units = [scheduler._split_scope(f"test_others_{number}.py::test_of_none[a::b]") for number in range(5)]
    assert units == [f"test_others_{number}.py" for number in range(5)]


def test_a_fixture_that_starts_ranks_is_seen(tmp_path):
    (tmp_path / "fixture.py").write_text("import pytest\n@pytest.fixture\ndef trained(curves): return 1\n")
    (tmp_path / "named.py").write_text("pool = 1\ndef test(whirlpool): pass\n")
    assert starts_ranks(tmp_path / "fixture.py")
    assert not starts_ranks(tmp_path / "named.py")

"""Which tests run, on which worker: skipped tests, tests that need a GPU or Slurm, rows of the matrix, ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.conftest import select_part
from tests.workers import RanksTogether

PLANTED = {
    "test_planted.py": """
import pytest

def test_passes(): pass

@pytest.mark.skip(reason="a reason to skip")
def test_is_skipped(): pass

@pytest.mark.xfail(reason="known")
def test_fails_as_expected(): assert False

@pytest.mark.gpu
def test_needs_a_gpu(): pass

@pytest.mark.slurm
def test_needs_slurm(): pass

@pytest.mark.browser
def test_needs_a_browser(): pass
""",
    "test_planted_file.py": 'import pytest\npytest.skip("a file to skip", allow_module_level=True)\n',
}

OPTIONS = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-ra", "--continue-on-collection-errors"]
# As in the Makefile, which a test below compares.
TWO_WORKERS = ["-n", "2", "--dist", "loadfile", "--max-worker-restart", "0"]


@pytest.fixture
def planted(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n  slurm\n  browser\n")

    def run(forbid: str, *options: str, files=PLANTED) -> tuple[int, str]:
        for name, source in files.items():
            (tmp_path / name).write_text(source)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *options, str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TITANLAB_FORBID_SKIPS": forbid, "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_skips_are_skips_on_a_persons_machine(planted):
    code, output = planted("0")
    assert code == 0
    assert "1 passed, 2 skipped, 3 deselected, 1 xfailed" in output
    assert "1 tests that need a GPU were not selected: this machine has none" in output
    assert "1 tests that need Slurm were not selected: it is not installed here" in output
    assert "1 tests that need a browser were not selected: none is installed here" in output


# Ranks of a fixture that the scheduler does not know.
HIDDEN_RANKS = """
import pytest

@pytest.fixture
def pool(): pass

ranks = pytest.fixture(lambda pool: pool, name="ranks")

def test_ranks(ranks): pass
"""


def test_skips_and_hidden_ranks_are_failures_where_they_are_forbidden(planted):
    code, output = planted("1", files={**PLANTED, "test_ranks.py": HIDDEN_RANKS})
    assert code != 0
    assert "this test starts ranks: add its fixture to RANK_FIXTURES" in output
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a reason to skip" in output
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a file to skip" in output
    assert "skipped" not in output.splitlines()[-1]


RANKS = """
import pytest

@pytest.fixture
def pool(): pass

def test_ranks(pool, worker_id): print("ranks on", worker_id)
def test_no_ranks(worker_id): print("ranks on", worker_id)
"""
NO_RANKS = """
def test_one(worker_id): print("others on", worker_id)
def test_two(worker_id): print("others on", worker_id)
"""


@pytest.mark.full
def test_two_workers_fail_and_report_as_one_process_does(planted):
    failing = "def test_fails(): assert 1 == 2\n"
    files = {**PLANTED, "test_a.py": RANKS, "test_b.py": NO_RANKS, "test_c.py": RANKS, "test_failing.py": failing}
    code, output = planted("1", *TWO_WORKERS, "-rPA", files=files)
    assert code != 0
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a reason to skip" in output
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a file to skip" in output
    assert re.search(r"^FAILED \S*test_failing.py::test_fails\b", output, re.MULTILINE)
    assert re.search(r"^ERROR \S*test_planted.py::test_is_skipped\b", output, re.MULTILINE)
    assert "1 failed, 7 passed, 1 xfailed, 2 errors" in output
    assert output.count("1 tests that need a GPU were not selected: this machine has none") == 1
    assert output.count("1 tests that need Slurm were not selected: it is not installed here") == 1
    # One worker runs all tests of a file.
    ranks, others = (re.findall(rf"^{name} on (gw\d)$", output, re.MULTILINE) for name in ("ranks", "others"))
    assert (len(ranks), len(others), len(set(others))) == (4, 2, 1)


@pytest.mark.full
def test_a_worker_that_dies_fails_the_run(planted):
    dying = "import os\ndef test_dies(): os._exit(0)\n"
    code, output = planted(
        "0", *TWO_WORKERS, files={"test_dying.py": dying, "test_other.py": "def test_passes(): pass\n"}
    )
    assert code != 0
    assert re.search(r"^worker '\w+' crashed while running 'test_dying.py::test_dies'$", output, re.MULTILINE)


class Item:
    def __init__(self, *markers: str) -> None:
        self.markers = markers

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers


def test_three_parts_hold_the_covering_rows_and_all_parts_the_slower_layer():
    items = [Item(*("full", "covering")[: number % 3]) for number in range(90)]
    quick, others, covering = ([item for item in items if len(item.markers) == count] for count in range(3))
    config = Mock()
    parts = []
    for part in range(1, 25):
        config.option.part, left = f"{part}/24", list(items)
        select_part(config, left)
        assert [item for item in left if item in quick] == quick
        parts.append({item for item in left if item not in quick})
    assert all(len(part & {*covering}) == 10 for part in parts)
    assert all({*covering} <= set().union(*parts[start : start + 3]) for start in range(22))
    assert sorted(len(part & {*others}) for part in parts) == [1] * 18 + [2] * 6
    assert {*others} <= set().union(*parts)
    for wrong in ("0/24", "25/24"):
        config.option.part = wrong
        with pytest.raises(pytest.UsageError, match="between 1 and"):
            select_part(config, [])


def test_the_makefile_starts_the_workers_so():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert f"TWO_WORKERS := {' '.join(TWO_WORKERS)}\n" in makefile


FILES = {
    **{f"test_ranks_{number}.py": "def test_of_ranks(pool): pass\n" for number in range(5)},
    **{f"test_others_{number}.py": "def test(whirlpool): pool = 1\n" for number in range(5)},
    "fixture.py": "import pytest\n@pytest.fixture\ndef trained(curves): return 1\n",
}


def test_files_with_tests_of_ranks_are_two_units_and_every_other_file_is_one(tmp_path):
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    scheduler = RanksTogether.__new__(RanksTogether)
    scheduler.config, scheduler._units = SimpleNamespace(rootpath=tmp_path), {}
    units = {name: scheduler._split_scope(f"{name}::test[a::b]") for name in FILES}
    assert list(units.values()) == [
        *("ranks 0", "ranks 1", "ranks 0", "ranks 1", "ranks 0"),
        *(f"test_others_{number}.py" for number in range(5)),
        "ranks 1",
    ]
    # xdist asks again when a test has ended.
    assert scheduler._split_scope("test_ranks_1.py::test_of_ranks") == "ranks 1"

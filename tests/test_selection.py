"""What conftest does with skipped tests, and with tests that need a GPU or Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
""",
    "test_planted_file.py": 'import pytest\npytest.skip("a file to skip", allow_module_level=True)\n',
}

OPTIONS = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-ra", "--continue-on-collection-errors"]


@pytest.fixture
def planted(tmp_path):
    for name, source in PLANTED.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n  slurm\n")

    def run(forbid: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, str(tmp_path)],
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
    assert "1 passed, 2 skipped, 2 deselected, 1 xfailed" in output
    assert "1 tests that need a GPU were not selected: this machine has none" in output
    assert "1 tests that need Slurm were not selected: it is not installed here" in output


def test_skips_are_failures_where_they_are_forbidden(planted):
    code, output = planted("1")
    assert code != 0
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a reason to skip" in output
    assert "skipped, which TITANLAB_FORBID_SKIPS=1 forbids: Skipped: a file to skip" in output
    assert "skipped" not in output.splitlines()[-1]

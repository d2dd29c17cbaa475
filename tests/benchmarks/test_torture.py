"""A training that is killed again and again loses nothing: the short form of benchmarks/torture.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "torture.py"


@pytest.mark.full
def test_a_training_that_is_killed_eight_times_is_that_which_nobody_has_disturbed(tmp_path):
    report = tmp_path / "report.json"
    how = ["--kills", "8", "--world", "2", "--steps", "60", "--every", "5", "--seconds", "0.6"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *how, "--folder", str(tmp_path), "--report", str(report)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(report.read_text())
    assert (found["wrong"], done.returncode) == ([], 0), done.stderr
    assert (found["count"], set(found["by_kind"].values())) == (8, {2})
    assert found["complete_runs"] >= 1
    assert found["most_steps_lost"] <= 10

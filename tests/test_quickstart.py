"""The quickstart as a newcomer runs it: a real training on real text over two processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TITANLAB = Path(sys.executable).parent / "titanlab"


@pytest.mark.full
def test_the_quickstart_learns_python_and_writes_some(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    train = subprocess.run(
        [TITANLAB, "train", "+recipe=quickstart", f"runs={tmp_path}/runs"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert train.returncode == 0, train.stderr
    (run,) = (tmp_path / "runs" / "single").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss_metrics/global_avg_loss"] for row in rows if row["kind"] == "train"]
    start = math.log(2048)
    assert losses[0] == pytest.approx(start, rel=0.05)
    assert losses[-1] < 0.6 * start
    assert json.loads((run / "result.json").read_text())["kind"] == "done"
    validation = [row["validation_metrics/loss"] for row in rows if row["kind"] == "validation"]
    assert validation[-1] < 0.6 * start
    sample = subprocess.run(
        [TITANLAB, "generate", run, "--prompt", "def ", "--tokens", "60"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert sample.returncode == 0, sample.stderr
    assert sample.stdout.startswith("def ")
    assert len(sample.stdout.strip()) > 30

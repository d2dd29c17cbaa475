"""The quickstart as a newcomer runs it: a real training on real text over two processes."""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path

import pytest

from tests.installed_command import titanlab


@pytest.fixture
def newcomer(tmp_path):
    """`newcomer("status", seconds=9)`: what titanlab prints where nobody has said how many threads there are."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return functools.partial(titanlab, folder=tmp_path, environ=environ)


@pytest.mark.full
@pytest.mark.covering
def test_the_quickstart_learns_python_and_writes_some(newcomer, tmp_path):
    newcomer("train", "+recipe=quickstart", f"runs={tmp_path}/runs", seconds=900)
    (run,) = (tmp_path / "runs" / "single").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss_metrics/global_avg_loss"] for row in rows if row["kind"] == "train"]
    start = math.log(2048)
    assert losses[0] == pytest.approx(start, rel=0.05)
    assert losses[-1] < 0.7 * start
    assert json.loads((run / "result.json").read_text())["kind"] == "done"
    validation = [row["validation_metrics/loss"] for row in rows if row["kind"] == "validation"]
    assert validation == sorted(validation, reverse=True)
    assert validation[-1] < 0.7 * start
    sample = newcomer("generate", run, "--prompt", "def ", "--tokens", "60", seconds=120)
    assert sample.startswith("def ")
    assert len(sample.strip()) > 30


@pytest.mark.full
def test_six_layouts_from_one_process_to_eight_train_alike_and_are_compared(newcomer, tmp_path):
    # Half the steps: they show the same.
    shorter = ("training.steps=30", "optimizer.schedule.warmup_steps=3")
    newcomer("sweep", "+sweeps=quickstart_layouts", *shorter, "--wait", seconds=1800)
    said = newcomer("collect", "quickstart_layouts", seconds=120).splitlines()
    rows = json.loads(newcomer("status", "quickstart_layouts", "--json", seconds=120))
    layouts = ["single", "dp_r2", "dp_s2", "dp_s2·tp2", "dp_s2·pp2", "dp_s2·tp2·pp2"]
    # The three that fit on two cores run three times.
    assert [row["layout.label"] for row in rows] == [*(3 * layouts[:3]), *layouts[3:]]
    assert {row["outcome"] for row in rows} == {"done"}
    assert [row["world"] for row in rows] == [*(3 * [1, 2, 2]), 4, 4, 8]
    # The same training: what sums in another order differs by is all that differs.
    losses = [row["loss"] for row in rows]
    assert max(losses) - min(losses) < 2e-3
    assert losses[0] < 0.85 * math.log(2048)
    # Where there are more processes than cores, that is said.
    assert [row["oversubscribed"] for row in rows] == [row["world"] > row["cores"] for row in rows]
    assert [line.split()[0] for line in said[2:8]] == layouts
    answer = newcomer("best", "quickstart_layouts", seconds=120).splitlines()[0]
    if rows[0]["cores"] > 1:
        assert " is the fastest: " in answer or "within noise" in answer
    # Sharded memory is less memory.
    memory = dict(zip(layouts, (row["memory_gib"] for row in rows), strict=True))
    assert memory["dp_s2·tp2·pp2"] < memory["single"]
    # The last line is the place of a page that shows all that.
    *_, last = newcomer("report", "quickstart_layouts", seconds=120).splitlines()
    assert last == "report: runs/quickstart_layouts/quickstart_layouts.html"
    page = (tmp_path / last.partition(": ")[2]).read_text()
    assert all(layout in page for layout in layouts)
    assert page.count("<figure") >= 5


def test_the_quickstart_ends_with_the_place_of_the_report():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    lines = makefile.partition("\nquickstart:")[2].partition("\n\n")[0].splitlines()
    assert lines[-1].endswith("titanlab report quickstart_layouts")

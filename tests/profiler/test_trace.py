"""Traces of some steps: a file for each rank, which changes nothing of the run."""

import gzip
import json

from tests import tiny
from titanlab.costs import meter
from titanlab.techniques.profiler.profilers_schema import Trace


def trained(made, run):
    return tiny.as_rank(made, run).kind


def test_each_rank_writes_a_trace_of_each_window(pool, tmp_path):
    losses = []
    for name, given in {"off": {}, "trace": {"profiler": Trace(skip=2, steps=1, every=3)}}.items():
        made = tiny.recipe(tmp_path, name=name, steps=6, shard=2, **given)
        run = tiny.begin(made)
        pool.run(2, trained, made, run)
        losses.append([row[meter.LOSS] for row in run.metrics("train")])
    assert losses[0] == losses[1]
    files = sorted(path.name for path in run.traces.iterdir())
    assert files == [f"attempt-1-steps-{steps}-rank-{rank}.json.gz" for steps in ("3-3", "6-6") for rank in (0, 1)]
    for path in run.traces.iterdir():
        content = json.loads(gzip.decompress(path.read_bytes()))
        names = {event.get("name", "") for event in content["traceEvents"]}
        assert "aten::mm" in names
        assert any("all_gather" in name or "allgather" in name for name in names)


def test_a_window_that_the_run_does_not_reach_leaves_no_file(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=3, profiler=Trace(skip=5))
    run = tiny.begin(made)
    pool.run(1, trained, made, run)
    assert list(run.traces.iterdir()) == []

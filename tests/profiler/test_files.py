"""Files of profilers are whole or absent, and one that cannot be written ends no training."""

import contextlib
import resource
import tempfile
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from tests import tiny
from titanlab.distributed import Watchdog, World
from titanlab.records import OutcomeKind
from titanlab.techniques.profiler.contract import NoProfiler
from titanlab.techniques.profiler.profilers_schema import Breakdown, Trace
from titanlab.train import train
from titanlab.train.recording import Recorder


@contextlib.contextmanager
def small_files(most):
    """Inside the block no file of this process grows beyond so many bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def trained(made, run, most):
    with small_files(most):
        return tiny.as_rank(made, run).kind


def warnings(run):
    text = (run.logs / "rank-0.log").read_text()
    assert "Traceback" not in text
    return [line for line in text.splitlines() if "training goes on" in line]


@pytest.mark.parametrize("made", [Trace(skip=2, steps=2), Breakdown(skip=2, steps=2)], ids=lambda made: made.kind)
def test_a_disk_that_takes_no_trace_leaves_a_warning_and_the_training_goes_on(made, pool, tmp_path):
    recipe = tiny.recipe(tmp_path, steps=6, saves="off", profiler=made)
    run = tiny.begin(recipe)
    assert pool.run(1, trained, recipe, run, 20_000) == [OutcomeKind.DONE]
    assert list(run.traces.iterdir()) == []
    assert run.metrics("breakdown") == []
    (line,) = warnings(run)
    assert ("attempt-1-steps-3-4-rank-0.json.gz" if made.kind == "trace" else "steps 3 to 4") in line
    assert "a file would be larger than the limit" in line


@pytest.mark.parametrize("every", [0, 4])
def test_a_folder_of_traces_that_is_none_leaves_a_warning(every, tmp_path):
    recipe = tiny.recipe(tmp_path, steps=9, saves="off", profiler=Trace(skip=2, steps=2, every=every))
    run = tiny.begin(recipe)
    run.traces.rmdir()
    run.traces.write_text("a file")
    assert tiny.as_rank(recipe, run).kind is OutcomeKind.DONE
    assert len(warnings(run)) == (1 if every == 0 else 2)


def test_a_window_that_the_end_of_the_run_cuts_is_reported_too(tmp_path):
    recipe = tiny.recipe(tmp_path, steps=4, saves="off", profiler=Trace(skip=2, steps=3))
    run = tiny.begin(recipe)
    with small_files(20_000):
        assert tiny.as_rank(recipe, run).kind is OutcomeKind.DONE
    assert list(run.traces.iterdir()) == []
    assert len(warnings(run)) == 1


@pytest.mark.parametrize("made", [Trace(skip=2, steps=2), Breakdown(skip=2, steps=2)], ids=lambda made: made.kind)
def test_no_room_for_temporary_files(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    recipe = tiny.recipe(tmp_path, steps=6, saves="off", profiler=made)
    run = tiny.begin(recipe)
    assert tiny.as_rank(recipe, run).kind is OutcomeKind.DONE
    (line,) = warnings(run)
    assert "No such file" in line
    assert "nothing" in line


def test_a_rank_that_does_not_log_writes_the_line_into_its_own_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "axis_groups", lambda mesh: {})
    world = World(rank=1, world=2, local_rank=1, device=torch.device("cpu"))
    profiler = NoProfiler()
    with train.profiled(
        profiler, SimpleNamespace(traces=tmp_path), world, None, Recorder(), attempt=1, model=torch.nn.Module()
    ):
        profiler.links.failed("the trace", ValueError("first\nsecond"))
    line = "warning: the trace is not written: ValueError: first; training goes on\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("made", [Trace(skip=2, steps=2), Breakdown(skip=2, steps=2)], ids=lambda made: made.kind)
def test_reading_and_writing_a_window_is_a_pause_and_no_part_of_a_step_that_may_hang(made, tmp_path, monkeypatch):
    recipe = tiny.recipe(tmp_path, steps=5, saves="off", profiler=made)
    dog = Watchdog(step_seconds=30.0, first_seconds=3600.0, note=pytest.fail)
    seen, exported = [], profile.export_chrome_trace

    def export(running, path):
        seen.append((dog._phase.where, dog._phase.limit))
        exported(running, path)

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    try:
        train.train(recipe, tiny.begin(recipe), tiny.ALONE, watchdog=dog)
    finally:
        dog.close()
    assert seen == [("the profiler after step 4", 3600.0)]


def one_rank_fails(made, run):
    import os

    if os.environ["RANK"] == "1":
        return trained(made, run, 20_000)
    return tiny.as_rank(made, run).kind


def test_parts_of_a_step_that_one_rank_lacks_are_not_reported(pool, tmp_path):
    recipe = tiny.recipe(tmp_path, steps=6, saves="off", shard=2, profiler=Breakdown(skip=2, steps=2))
    run = tiny.begin(recipe)
    assert pool.run(2, one_rank_fails, recipe, run) == [OutcomeKind.DONE] * 2
    assert run.metrics("breakdown") == []
    (line,) = warnings(run)
    assert "the breakdown of steps 3 to 4 is not written: its part is missing on rank 1" in line

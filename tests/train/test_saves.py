"""When a run saves, and what becomes of a save that fails."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.planted_schema import Planted
from tests.pool import RankFailure
from tests.until import until
from titanlab.checkpoint import list_checkpoints, loading, read_contents, saving, step_of
from titanlab.checkpoint.folders import checkpoints
from titanlab.distributed import ALONE, joined
from titanlab.errors import ConfigError
from titanlab.launch.attempt import check_own_checkpoint
from titanlab.prove.parity import trace
from titanlab.records import OutcomeKind, classify, from_exit
from titanlab.system import FolderGone, disk_fault
from titanlab.train import Observer, check_beginning
from titanlab.train import train as module
from titanlab.train.dcp import source_of
from titanlab.train.generate import _load

STEPS = 6


def losses(made, run):
    return trace(made, run, joined(os.environ) or ALONE).losses


def steps(run):
    return [step_of(path) for path in checkpoints(run.checkpoints)]


class Mover(Observer):
    """Renames the run's folder after a step."""

    def __init__(self, run, to):
        self.run, self.to = run, to

    def after_step(self, step, totals):
        if step == 3:
            self.run.path.rename(self.to)


def test_a_folder_that_is_moved_while_the_run_goes_on_does_not_come_back_in_its_old_place(tmp_path):
    made = tiny.recipe(tmp_path / "runs", steps=STEPS, saves="async", every=2)
    run = tiny.begin(made)
    moved = run.path.with_name(f"moved-{run.hash8}")
    with pytest.raises(FolderGone) as failure:
        tiny.as_rank(made, run, Mover(run, moved))
    assert classify(failure.value) is OutcomeKind.CRASH
    assert "was moved or removed while the run went on" in disk_fault(failure.value)
    for write in (
        lambda: run.write_failure(from_exit(1, rank=0, attempt=1)),
        lambda: run.write_result(from_exit(1, attempt=1)),
        lambda: run.note_saved(1, 4),
    ):
        with pytest.raises(FolderGone):
            write()
    assert [path.name for path in moved.parent.iterdir()] == [moved.name]


class Blocker(Observer):
    """Puts a file where the checkpoints were, after a step."""

    def __init__(self, run):
        self.run = run

    def after_step(self, step, totals):
        if step == 3:
            shutil.rmtree(self.run.checkpoints)
            self.run.checkpoints.write_text("")


def test_a_file_where_the_checkpoints_were_is_told_in_a_line(tmp_path):
    made = tiny.recipe(tmp_path / "runs", steps=STEPS, every=2)
    run = tiny.begin(made)
    with pytest.raises(OSError) as failure:
        tiny.as_rank(made, run, Blocker(run))
    assert disk_fault(failure.value) == (
        f"a file stands where a folder was ({run.checkpoints}): move it away, then go on with titanlab resume or retry"
    )


def full_disk(made, run, failing_steps):
    """As a rank: train on a disk that takes no checkpoint of some steps."""
    real = saving.write

    def refused(save, content):
        if int(save.folder.name.partition("-")[2].partition(".")[0]) in failing_steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(save, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write", refused)
        return losses(made, run)


def test_the_training_goes_on_after_a_save_that_fails(pool, tmp_path):
    """Like a disk that is full for a while."""
    made = tiny.recipe(tmp_path, steps=STEPS, every=2, keep=0, shard=2)
    run = tiny.begin(made)
    pool.run(2, full_disk, made, run, {4})
    assert run.result().kind is OutcomeKind.DONE
    assert (steps(run), len(list(run.checkpoints.iterdir()))) == ([2, 6], 2)
    log = (run.logs / "rank-0.log").read_text()
    assert log.count("the checkpoint of step 4 is not saved: the disk is full") == 1
    assert "make room; training goes on" in log.replace("\n", " ").replace("  ", " ")


def test_a_save_in_the_background_that_fills_the_disk_does_not_end_the_run(tmp_path, monkeypatch):
    """metrics.jsonl and status.json find no room until the files of the save are removed."""
    made = tiny.recipe(tmp_path, steps=STEPS, saves="async", every=2, keep=0)
    run = tiny.begin(made)
    real, write, full, met = saving.write, os.write, threading.Event(), threading.Event()

    def filling(save, content):
        if "step-00000004" in save.folder.name:
            full.set()
            met.wait(30)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(save, content)

    def refused(descriptor, content):
        if full.is_set() and bytes(content).startswith(b'{"kind": "train", "step": 5'):
            # Half of the row fits.
            full.clear()
            refused.left = write(descriptor, bytes(content)[:9])
            return refused.left
        if getattr(refused, "left", 0) and not met.is_set():
            met.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr(saving, "write", filling)
    monkeypatch.setattr(os, "write", refused)
    tiny.as_rank(made, run)
    assert met.is_set()
    assert (run.result().kind, steps(run)) == (OutcomeKind.DONE, [2, 6])
    assert [row["step"] for row in run.metrics("train")] == list(range(1, STEPS + 1))
    assert "the checkpoint of step 4 is not saved: the disk is full" in (run.logs / "rank-0.log").read_text()


def test_the_last_save_must_succeed(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, saves="async", every=4, shard=2)
    run = tiny.begin(made)
    with pytest.raises(RankFailure, match="No space left"):
        pool.run(2, full_disk, made, run, {6})
    assert (steps(run), len(list(run.checkpoints.iterdir()))) == ([4], 1)


def test_an_interval_in_minutes_goes_by_the_clock(tmp_path, monkeypatch):
    """A step takes 20 s. That rank 0 decides for all: test_totals.py."""
    ticks, real = iter(range(10_000)), module.Saves
    clocked = functools.partial(real, clock=lambda: 20.0 * next(ticks))
    monkeypatch.setattr(module, "Saves", clocked)
    made = tiny.recipe(tmp_path, steps=10, saves="async", minutes=1.0, keep=0)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    # The clock is read once a step and once a save.
    assert steps(run) == [3, 6, 9, 10]


class SlowWrites:
    """A disk on which each save takes a while."""

    def __init__(self, patch, seconds):
        real = saving.write

        def slow(*given):
            time.sleep(seconds)
            return real(*given)

        patch.setattr(saving, "write", slow)


def test_a_second_save_waits_for_the_first_and_a_stop_too(tmp_path, monkeypatch):
    SlowWrites(monkeypatch, 0.3)
    fault = Planted(fault="SIGINT", step=3)
    made = tiny.recipe(tmp_path, steps=STEPS, saves="async", every=1, keep=0, data=fault)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    assert run.result().kind is OutcomeKind.CANCELLED
    assert steps(run) == [1, 2, 3]
    # The wait is not part of a step.
    assert run.result().metrics["time_metrics/paused(s)"] > 0.55


def test_an_error_does_not_wait_for_the_save_under_way(tmp_path, monkeypatch):
    goes_on, real = threading.Event(), saving.write
    monkeypatch.setattr(saving, "write", lambda *given: goes_on.wait(60) and real(*given))
    fault = Planted(fault="raise", step=3)
    made = tiny.recipe(tmp_path, steps=STEPS, saves="async", every=2, data=fault)
    run = tiny.begin(made)
    with pytest.raises(Exception, match="planted"):
        tiny.as_rank(made, run)
    assert steps(run) == []
    goes_on.set()
    until(lambda: not any(thread.name == "checkpoint" for thread in threading.enumerate()))


def killed_while_writing(made, run):
    """As a rank: the write of step 4 does not end before the process is killed in step 6."""
    real = os.fsync

    def slow(file):
        if threading.current_thread().name == "checkpoint" and (run.checkpoints / "step-00000004.part").exists():
            time.sleep(60)
        real(file)

    os.fsync = slow
    return losses(made, run)


def test_a_run_that_is_killed_during_a_write_goes_on_bit_for_bit(pool, tmp_path):
    made = tiny.recipe(tmp_path, name="straight", steps=8, data=Planted(), saves="async", every=2)
    straight = pool.run(1, losses, made, tiny.begin(made))[0]
    made = replace(made, name="killed", data=Planted(fault="kill", step=6))
    run = tiny.begin(made)
    with pytest.raises(RankFailure, match="exit code -9"):
        pool.run(1, killed_while_writing, made, run)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000002", "step-00000004.part"]
    assert list((run.checkpoints / "step-00000004.part").glob("rank-*"))
    made = replace(made, data=Planted())
    assert pool.run(1, losses, made, tiny.begin(made, run))[0] == straight[2:]
    assert steps(run) == [6, 8]
    assert len(list(run.checkpoints.iterdir())) == 2


@pytest.fixture(scope="module")
def only_model(pool, tmp_path_factory):
    """A run of two ranks whose last checkpoint has the model in bf16, and the rank's own parameters at its end."""
    made = tiny.recipe(
        tmp_path_factory.mktemp("model"), steps=4, shard=2, saves="async", every=2, last="model", last_dtype="bfloat16"
    )
    run = tiny.begin(made)
    return made, run, pool.run(2, parameters_at_end, made, run)[0]


def parameters_at_end(made, run):
    return trace(made, run, joined(os.environ) or ALONE).parameters


def test_the_last_checkpoint_may_have_the_model_only(only_model):
    made, run, _ = only_model
    assert steps(run) == [2, 4]
    index = json.loads((run.checkpoints / "step-00000004" / "index.json").read_text())
    assert {name.partition(".")[0] for name in index["tensors"]} == {"model"}
    assert [row.problem for row in list_checkpoints(run.checkpoints, verifies=True)] == [None, None]
    source = source_of(read_contents(run.checkpoints / "step-00000004", "run"), made.model)
    assert {entry.dtype for entry in source.entries.values()} == {"BF16"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_generate_reads_a_checkpoint_of_the_model_only(only_model):
    made, run, parameters = only_model
    checkpoint = run.checkpoints / "step-00000004"
    with patch.object(loading, "BlockReader", wraps=loading.BlockReader) as opened:
        module = _load(made, checkpoint, torch.device("cpu"))
    # In a store each opening of a file is a request.
    assert opened.call_count == len(list(checkpoint.glob("*.safetensors")))
    for name, value in module.named_parameters():
        assert value.dtype == torch.float32
        assert torch.equal(value, parameters[name].bfloat16().float())


@pytest.mark.parametrize("how", ["resume", "load_from"])
def test_no_run_resumes_from_the_model_only(only_model, how):
    made, run, _ = only_model
    checkpoint = run.checkpoints / "step-00000004"
    line = "step-00000004: has the model only .*so no run resumes from it; start a new run with init_from="
    with pytest.raises(ConfigError, match=line):
        if how == "resume":
            check_own_checkpoint(run, made, checkpoint)
        else:
            check_beginning(tiny.changed(made, load_from=str(checkpoint)))


def test_a_run_that_is_stopped_saves_everything(tmp_path):
    fault = Planted(fault="SIGINT", step=3)
    made = tiny.recipe(tmp_path, steps=STEPS, last="model", data=fault)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    check_own_checkpoint(run, made, run.checkpoints / "step-00000003")

"""A rank that dies in the midst of a step, of four that need it: the others are gone within ten seconds.

What is run is the command that a person types. The others wait meanwhile: in a collective, or for a message of the
stage before or behind.
"""

import os
import signal
import time

import pytest

from tests.launch.command import Command, alive, children
from tests.until import until
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.full

SECONDS = 10.0
PIPELINE_TENSOR = ["parallelism.pipeline=2", "parallelism.tensor=2", "training.microbatch=1"]
SHARD_CONTEXT = ["parallelism.shard=2", "parallelism.context=2"]
PIPELINE_SHARD = ["parallelism.pipeline=2", "parallelism.shard=2", "training.microbatch=1"]
COPIES_TENSOR = ["parallelism.replicate=2", "parallelism.tensor=2"]
# Stages 0 1 1 0, and backward passes in halves.
V_SHAPED = [*PIPELINE_TENSOR, "schedule=zbv", "model.layers=4"]


def dead(command, layout, fault, where, rank):
    """Exit code, output, result; after it has been seen that nobody is left, and soon."""
    seconds, *what_is_left = died(command, layout, fault, where, rank)
    if seconds > SECONDS:
        # Other work on the machine may have had the cores. Ranks that stay long do so again.
        seconds, *what_is_left = died(Command(command.folder / "again"), layout, fault, where, rank)
    assert seconds <= SECONDS
    return what_is_left


def died(command, layout, fault, where, rank):
    """Seconds from the death to the end, exit code, output, result."""
    faults = [f"data.fault={fault}", f"data.where={where}", f"data.rank={rank}", "data.step=2"]
    process = command.start(*layout, *faults, "training.steps=60")
    try:
        until(lambda: process.poll() is not None or len(children(process.pid)) >= 4)
        ranks = children(process.pid)
        # The start of four processes may take long on a busy machine: only what follows the death is measured.
        out, err = process.communicate(timeout=180)
        ended = time.time()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert len(ranks) >= 4, err
    assert [pid for pid in ranks if alive(pid)] == []
    run = command.only_run
    assert (run.status().state, run.status().outcome) == ("ended", run.result().kind.value)
    assert run.result().rank == rank
    return ended - float((command.folder / "died").read_text()), process.returncode, out + err, run.result()


@pytest.mark.parametrize(
    ("layout", "where", "rank"),
    [
        pytest.param(PIPELINE_TENSOR, "backward", 3, id="last stage"),
        pytest.param(PIPELINE_TENSOR, "forward", 1, id="first stage"),
        pytest.param(SHARD_CONTEXT, "forward", 3, id="context", marks=pytest.mark.full),
        pytest.param(V_SHAPED, "backward", 2, id="v", marks=pytest.mark.full),
        pytest.param(COPIES_TENSOR, "backward", 1, id="copies"),
    ],
)
def test_it_raises(command, layout, where, rank):
    code, said, result = dead(command, layout, "raise", where, rank)
    assert (code, result.kind, result.exit_code, result.step) == (1, OutcomeKind.CRASH, 1, 1)
    assert result.cause == "LookupError: a planted fault"
    assert "in _fail" in result.traceback
    # Its own traceback, and nothing of those who only lost it.
    assert said.count("Traceback (most recent call last)") == 1
    assert result.traceback.rstrip() in said


@pytest.mark.parametrize(
    ("layout", "where", "rank"),
    [
        pytest.param(SHARD_CONTEXT, "forward", 1, id="context", marks=pytest.mark.full),
        pytest.param(PIPELINE_TENSOR, "forward", 2, id="last stage", marks=pytest.mark.full),
        pytest.param(PIPELINE_SHARD, "backward", 3, id="pipeline of shards"),
    ],
)
def test_it_is_killed(command, layout, where, rank):
    code, said, result = dead(command, layout, "kill", where, rank)
    assert (code, result.kind, result.exit_code) == (1, OutcomeKind.CRASH, -9)
    assert "SIGKILL" in result.cause
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("layout", "where", "rank"),
    [
        pytest.param(PIPELINE_TENSOR, "backward", 1, id="first stage", marks=pytest.mark.full),
        pytest.param(SHARD_CONTEXT, "backward", 2, id="context"),
        pytest.param(COPIES_TENSOR, "forward", 3, id="copies"),
    ],
)
def test_it_leaves_without_a_word(command, layout, where, rank):
    code, said, result = dead(command, layout, "exit", where, rank)
    assert (code, result.kind, result.exit_code) == (1, OutcomeKind.CRASH, 7)
    assert "exit code 7" in result.cause
    assert "Traceback" not in said

"""A launcher that is killed: its ranks save, and say why they end."""

import os
import signal

import pytest

from tests.until import until
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.full


@pytest.mark.parametrize("layout", [[], ["parallelism.shard=2"]])
def test_the_cause_names_the_launcher(command, layout):
    process = command.start(*layout, "training.steps=100000")
    try:
        run = command.reached(3)
        process.kill()
        process.communicate()
        until(lambda: run.status().state == "ended")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    result = run.result()
    assert (result.kind, result.cause) == (OutcomeKind.PREEMPTED, "its launcher is gone; the run can be resumed")
    assert run.saved_step() == result.step

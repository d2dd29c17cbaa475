"""Compilations are counted and timed, and told once where they should not have been necessary."""

import json
import os

import pytest
import torch
from torch._dynamo import utils
from torch.nn.attention import SDPBackend

from tests import tiny
from titanlab.costs import meter
from titanlab.distributed import ALONE, joined
from titanlab.techniques.compile.compiler import RECOMPILATIONS, SECONDS, Watch
from titanlab.train import train as story


def compiled(function):
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("validates_first", [False, True])
def test_a_validation_may_compile_everything_once_more(validates_first):
    """A resumed run may validate before its first step."""
    torch._dynamo.reset()
    watched = Watch()
    weight = torch.ones(1, requires_grad=True)
    double = compiled(lambda x: x * weight)

    def surprises(size, *, evaluating):
        with torch.set_grad_enabled(not evaluating):
            double(torch.ones(size))
        if evaluating:
            watched.after_validation(1)
        else:
            watched.after_step(1, first=False)
        return watched.metrics()[RECOMPILATIONS]

    assert surprises(2, evaluating=validates_first) == surprises(2, evaluating=not validates_first) == 0
    assert [surprises(3, evaluating=True), surprises(4, evaluating=False)] == [1, 2]


def test_optimizers_compile_once_for_each_shape(monkeypatch):
    watched = Watch()
    place = {"start_time_us": 0, "end_time_us": 2_000_000, "co_filename": "/packages/torchao/optim/adam.py"}

    def records(*spans):
        return [
            utils.CompilationMetrics(
                co_name="update", co_firstlineno=7, recompile_reason="0/0: size", **{**place, **span}
            )
            for span in spans
        ]

    given = records({}, {"start_time_us": 1_000_000, "end_time_us": 3_000_000})
    monkeypatch.setattr(utils, "get_compilation_metrics", lambda: given)
    # Time that overlaps counts once.
    assert watched.after_step(1, first=True) == 3.0
    assert watched.metrics()[RECOMPILATIONS] == 0
    given += records({"start_time_us": 5_000_000, "end_time_us": 6_000_000})
    assert watched.after_step(2, first=False) == 1.0
    assert watched.metrics() == {SECONDS: 4.0, RECOMPILATIONS: 1}


class Meddler(story.Observer):
    """Changes after two steps what every block has been compiled for, and after three once more."""

    def with_gradients(self, step, model):
        self.model = model

    def after_step(self, step, totals):
        if step in (2, 3):
            for block in self.model.layers.values():
                block.attention.inner._backends = [SDPBackend.MATH] * (step - 1)


def trained(made, run, observer=None):
    torch._dynamo.reset()
    return story.train(made, run, joined(os.environ) or ALONE, observer=observer)


def test_a_recompilation_is_told_once_and_counted(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=5, blocks=True, backend="eager")
    run = tiny.begin(made)
    pool.run(1, trained, made, run, Meddler())
    assert json.loads((run.path / "result.json").read_text())["metrics"][RECOMPILATIONS] == 2
    assert [row[RECOMPILATIONS] for row in run.metrics("train")] == [0, 0, 1, 2, 2]
    log = (run.logs / "rank-0.log").read_text()
    assert log.count("was compiled again") == 1
    assert "step 3: forward (llama.py:" in log
    assert "_backends" in log.partition("was compiled again")[2]


def test_compilation_is_reported_and_belongs_to_no_step(pool, tmp_path):
    made = tiny.recipe(
        tmp_path, steps=4, blocks=True, loss=True, backend="eager", validate_every=2, validation_sequences=15
    )
    run = tiny.begin(made)
    pool.run(1, trained, made, run)
    rows = run.metrics("train")
    # Validation compiles what is without gradients; its last batch, of 3 rows, is filled up.
    assert [row[RECOMPILATIONS] for row in rows] == [0] * 4
    assert 0 < rows[0][SECONDS] == rows[1][SECONDS] < rows[2][SECONDS] == rows[3][SECONDS]
    result = json.loads((run.path / "result.json").read_text())["metrics"]
    assert result[SECONDS] == rows[-1][SECONDS]
    assert result[RECOMPILATIONS] == 0
    # What is left of the first step is less than compiling took, which is many such steps.
    assert rows[0][meter.STEP_SECONDS] < rows[0][SECONDS] < result[meter.PAUSED_SECONDS]
    log = (run.logs / "rank-0.log").read_text()
    assert log.count("compiled in ") == 1
    assert "loss_sum (loss.py:" in log

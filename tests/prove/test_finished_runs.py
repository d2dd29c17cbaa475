"""Two finished runs are compared by what they have logged, or refused in one line."""

from __future__ import annotations

import math

import pytest

from tests.sweep.made import Made
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.prove import compare_runs
from titanlab.records import Outcome, OutcomeKind
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.precision.float8_schema import Float8Rowwise

STEPS = 10
TOKENS = 384


@pytest.fixture
def made(tmp_path):
    """Makes a finished run whose losses are multiplied by a factor, from a step on."""
    sweep = Made(tmp_path / "runs")

    def make(name, *, factor=1.0, since=1, kind=OutcomeKind.DONE, last=STEPS, norm=1.0, **given):
        run = sweep.run(name, seed=given.pop("seed", 0), **given)
        run.begin_attempt(run.config(), {})
        with run.open_metrics(1) as metrics:
            for step in range(1, last + 1):
                loss = (5.0 - 0.1 * step) * (factor if step >= since else 1.0)
                norms = norm if step >= since else 1.0
                row = {meter.LOSS: loss, meter.GRAD_NORM: norms, meter.TOKENS_SEEN: step * TOKENS}
                metrics.write("train", step, row)
        if kind is not None:
            cause = "step 10: loss nan" if kind is OutcomeKind.NAN else "LookupError: a planted fault"
            cause = None if kind is OutcomeKind.DONE else cause
            run.write_result(Outcome(kind=kind, step=last, steps=STEPS, attempt=1, cause=cause))
        return run

    return make


def test_equal_logs_pass(made):
    comparison = compare_runs(made("one"), made("two", shard=2, factor=1 + 1e-7))
    row = comparison.row
    assert row.passed
    assert not row.reason
    assert row.layout == "dp_s2 against single"
    assert (row.gradient, row.parameter) == (None, None)
    assert row.loss == pytest.approx(1e-7, rel=1e-3)
    assert row.tolerance == {"first_step": 1e-5, "loss": 1e-2, "grad_norm": 5e-2}
    assert (comparison.compared, comparison.logged) == (STEPS, STEPS)


def test_rounding_may_grow_after_the_first_step(made):
    one = made("one")
    assert compare_runs(one, made("later", shard=2, factor=1.001, since=5)).row.passed
    at_once = compare_runs(one, made("at-once", shard=3, factor=1.001)).row
    assert at_once.reason == "the first logged loss differs by 1.0e-03, more than 1e-05"
    drifted = compare_runs(one, made("drifted", tensor=2, factor=1.02, since=9)).row
    assert drifted.reason == "a loss differs by 2.0e-02, more than 1e-02"
    norms = compare_runs(one, made("norms", replicate=2, norm=2.0, since=2)).row
    assert norms.reason == "the median grad norm differs by 1.0e+00, more than 5e-02"


def test_fewer_bits_differ_more(made):
    one = made("one")
    assert compare_runs(one, made("bf16", precision=Bf16(), factor=1.005)).row.passed
    assert compare_runs(one, made("float8", precision=Float8Rowwise(), factor=1.03)).row.passed
    assert not compare_runs(one, made("worse", precision=Bf16(), replicate=2, factor=1.03)).row.passed


def test_a_run_with_nan_fails(made):
    one = made("one")
    row = compare_runs(one, made("nan", shard=2, kind=OutcomeKind.NAN, factor=math.nan, since=10)).row
    assert row.reason == "nan-" + row.run[4:] + " ended as nan: step 10: loss nan; a loss is not finite"
    assert not row.passed


def test_lines_that_are_damaged_are_not_compared(made):
    one, two = made("one"), made("two", shard=2)
    file = two.path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(
        "".join([*lines[:5], lines[5][:20] + "\n", '{"kind": "train", "step": 7, "attempt": 1}\n', *lines[8:]])
    )
    comparison = compare_runs(one, two)
    assert comparison.row.passed
    assert (comparison.compared, comparison.logged) == (STEPS - 3, STEPS)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"seed": 1}, "seed=1: cannot be compared with one-[0-9a-f]{8}, which has seed=0; compare runs that differ in"),
        ({"global_batch": 24}, "training.global_batch=24: cannot be compared"),
        ({"vocab_size": 300}, "model.vocab_size=300: cannot be compared"),
        ({"steps": 20}, "training.steps=20: cannot be compared"),
        ({"kind": None}, "has not finished: starting, step 0"),
        ({"kind": OutcomeKind.CRASH}, "ended as crash at step 10 of 10: LookupError: a planted fault; compare runs"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_compared_is_refused(made, keys, complaint):
    one = made("one")
    with pytest.raises(ConfigError, match=complaint):
        compare_runs(one, made("two", **keys))
    with pytest.raises(ConfigError, match="is both runs"):
        compare_runs(one, one)


def test_logs_of_other_steps_have_nothing_in_common(made):
    one, two = made("one"), made("two", shard=2)
    file = two.path / "metrics.jsonl"
    file.write_text(file.read_text().replace(meter.TOKENS_SEEN, "another"))
    with pytest.raises(ConfigError, match="has no logged step in metrics.jsonl"):
        compare_runs(one, two)
    file.write_text(file.read_text().replace('"another": ', f'"{meter.TOKENS_SEEN}": 1'))
    with pytest.raises(ConfigError, match="has no logged step in common with one-"):
        compare_runs(one, two)

"""A run goes on under another layout, and back, with the same tokens in the same order, and ends with the same model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.planted_schema import Planted
from titanlab.data import source
from titanlab.data.indexed import rank_samples
from titanlab.prove import TrainingTrace, parity
from titanlab.records import OutcomeKind
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveOp
from titanlab.techniques.schedule.published_schema import ZBV, DualPipeV, Interleaved1F1B

BATCH = 16
STEPS = 6
# The steps after which the layout changes: to the second, and back to the first.
STOPS = (2, 4)
BAR = 1e-5
# As in the matrix of parity: with a smaller eps, elements whose gradient is only rounding move as far as the others.
COMMON = {"layers": 4, "steps": STEPS, "global_batch": BATCH, "seq_len": 32, "eps": 1e-6}


@dataclass(frozen=True)
class Told:
    """What one rank saw: its trace, and the tokens of its batches with the numbers of their samples, by step."""

    kind: OutcomeKind
    trace: TrainingTrace = field(default_factory=TrainingTrace)
    tokens: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)


class _Recorded:
    """A stream that keeps the tokens of its batches, by step and sample."""

    def __init__(self, inner: Any, *, rank: int, ranks: int, tokens: dict[int, dict[int, np.ndarray]]) -> None:
        self._inner, self._rank, self._ranks, self._tokens = inner, rank, ranks, tokens

    def next_batch(self):
        begin = self._inner.state()["samples"]
        batch = self._inner.next_batch()
        samples = rank_samples(begin, global_batch=BATCH, rank=self._rank, ranks=self._ranks)
        self._tokens[begin // BATCH + 1] = dict(zip(samples, np.array(batch.tokens), strict=True))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def attempt(made, run):
    """Train as a rank of the pool. Returns its trace and the tokens that it was given."""
    usual, tokens, tracer = source.open_train, {}, parity.Tracer(made.layout)

    def open_train(config, *, rank, ranks, **how):
        return _Recorded(usual(config, rank=rank, ranks=ranks, **how), rank=rank, ranks=ranks, tokens=tokens)

    source.open_train = open_train
    try:
        outcome = tiny.as_rank(made, run, tracer)
    finally:
        source.open_train = usual
    return Told(outcome.kind, tracer.trace, tokens)


def whole_batches(told: list[Told]) -> dict[int, np.ndarray]:
    """The tokens of every step, [global_batch, seq], in the order of the samples, from all ranks of an attempt."""
    steps: dict[int, dict[int, np.ndarray]] = {}
    for rank in told:
        for step, rows in rank.tokens.items():
            known = steps.setdefault(step, {})
            for sample, row in rows.items():
                # Ranks that share a sequence are given the same one.
                assert np.array_equal(known.setdefault(sample, row), row)
    for step, rows in steps.items():
        assert sorted(rows) == list(range((step - 1) * BATCH, step * BATCH))
    return {step: np.stack([rows[sample] for sample in sorted(rows)]) for step, rows in steps.items()}


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    """The trace and the tokens by step of the run in one process that nothing interrupts."""
    made = tiny.recipe(tmp_path_factory.mktemp("undisturbed"), data=Planted(), **COMMON)
    told = pool.run(1, attempt, made, tiny.begin(made))
    return told[0].trace, whole_batches(told)


def _pair(name: str, first: dict[str, Any], second: dict[str, Any], *marks: str) -> Any:
    """A row of the slower layer, with more marks; without any mark but `quick` it is one of the faster layer."""
    every = [] if marks == ("quick",) else ["full", *marks]
    return pytest.param(first, second, id=name, marks=[getattr(pytest.mark, mark) for mark in every])


PAIRS = [
    _pair("one-ddp2", {}, {"replicate": 2}, "quick"),
    _pair("fsdp_tp-pp", {"shard": 2, "tensor": 2}, {"pipeline": 2}, "covering"),
    _pair("cp-tp", {"context": 2}, {"tensor": 2}),
    _pair("one-fsdp8", {}, {"shard": 8}),
    _pair("one-4d16", {}, {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}),
    _pair("fsdp8-4d16", {"shard": 8}, {"pipeline": 2, "replicate": 2, "context": 2, "tensor": 2}),
    _pair("hsdp-fsdp", {"replicate": 2, "shard": 2}, {"shard": 4}),
    _pair("fsdp8-hsdp16", {"shard": 8}, {"replicate": 2, "shard": 8}),
    _pair("1f1b-zbv", {"pipeline": 2}, {"pipeline": 2, "pipeline_schedule": ZBV()}),
    _pair(
        "interleaved-dualpipe_tp",
        {"pipeline": 2, "pipeline_schedule": Interleaved1F1B()},
        {"pipeline": 2, "tensor": 2, "pipeline_schedule": DualPipeV()},
    ),
    _pair("ac", {"shard": 2, "ac": FullCheckpointing()}, {"tensor": 2, "ac": SelectiveOp()}),
    _pair("fsdp_cp_tp-ddp4", {"shard": 2, "context": 2, "tensor": 2}, {"replicate": 4}),
    _pair("pp_fsdp_tp-cp4", {"pipeline": 2, "shard": 2, "tensor": 2}, {"context": 4}),
    _pair("ddp-offload", {"replicate": 2}, {"shard": 2, "cpu_offload": True}),
    _pair("accumulation", {"shard": 4}, {"microbatch": 2}),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_at_another_layout_and_back(pool, undisturbed, tmp_path, first, second):
    run, traces, tokens = None, [], {}
    for stop, layout in zip((*STOPS, 0), (first, second, first), strict=True):
        made = tiny.recipe(tmp_path, **COMMON, **layout)
        # The process that asks to stop is the last of those that read different data.
        made = replace(made, data=Planted(fault="SIGINT" if stop else "", step=stop, rank=made.layout.data - 1))
        run = tiny.begin(made, run)
        told = pool.run(made.world, attempt, made, run)
        assert {each.kind for each in told} == {OutcomeKind.CANCELLED if stop else OutcomeKind.DONE}
        traces.append(told[0].trace)
        tokens |= {step: batch for step, batch in whole_batches(told).items() if step not in tokens}
    straight, batches = undisturbed
    assert sorted(tokens) == sorted(batches) == list(range(1, STEPS + 1))
    for step, batch in batches.items():
        assert np.array_equal(tokens[step], batch), step
    whole = replace(
        traces[-1],
        losses=[loss for trace in traces for loss in trace.losses],
        grad_norms=[norm for trace in traces for norm in trace.grad_norms],
        # Of the first step.
        gradients=traces[0].gradients,
    )
    difference = parity.compare(straight, whole)
    assert difference.largest <= BAR, difference
    # Steps differ, so that equal tokens and losses mean something.
    assert len({batch.tobytes() for batch in batches.values()}) == len(set(straight.losses)) == STEPS

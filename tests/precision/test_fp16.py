"""fp16 in the loop: a planted overflow, its end, its resumption; and that scaling changes no bit."""

import contextlib
import math
import os
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.planted_schema import Planted
from titanlab.checkpoint.folders import checkpoints
from titanlab.costs import meter
from titanlab.parallelism import SplitLoss
from titanlab.prove import parity
from titanlab.records import OutcomeKind
from titanlab.techniques.precision.cast import Cast, DynamicLossScale
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.train import assemble

STEPS = 6
BAD = 3


@dataclass(kw_only=True)
class Told:
    """What a rank tells of a run: its trace, how it ended, totals by step, parameters as they were before each update."""

    trace: parity.TrainingTrace
    kind: OutcomeKind
    step: int
    totals: list = field(default_factory=list)
    before: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class Watcher(parity.Tracer):
    def __init__(self, layout):
        super().__init__(layout)
        self.totals, self.before = [], {}

    def with_gradients(self, step, model):
        super().with_gradients(step, model)
        self.before[step] = [getattr(p.data, "_local_tensor", p.data).clone() for p in model.parameters()]

    def after_step(self, step, totals):
        super().after_step(step, totals)
        self.totals.append(totals)


def overflowing(loss, steps, microbatches):
    """The same loss, whose gradient passes float16's largest number in some steps."""
    calls = 0

    def wrapped(logits, labels):
        nonlocal calls
        if torch.is_grad_enabled():
            calls += 1
            # In the last of a step's microbatches: what the others left is lost, too.
            if calls % microbatches == 0 and calls // microbatches in steps:
                logits.register_hook(lambda gradient: gradient * 1e30)
        return loss(logits, labels)

    return wrapped


def attempt(made, run, bad_steps=(), bad_rank=-1):
    """Train; on one rank the gradients of some steps overflow."""
    watcher = Watcher(made.layout)
    with contextlib.ExitStack() as stack:
        if int(os.environ["RANK"]) == bad_rank:
            given = (bad_steps, made.microbatches)
            stack.enter_context(patch.object(assemble, "loss_sum", overflowing(assemble.loss_sum, *given)))
            call = SplitLoss.__call__
            inner = {}

            def split(self, logits, labels):
                wrapped = inner.setdefault("loss", overflowing(lambda *both: call(self, *both), *given))
                return wrapped(logits, labels)

            stack.enter_context(patch.object(SplitLoss, "__call__", split))
        outcome = tiny.as_rank(made, run, watcher)
    return Told(trace=watcher.trace, kind=outcome.kind, step=outcome.step, totals=watcher.totals, before=watcher.before)


def full(*values, **named):
    return pytest.param(*values, **named, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({"shard": 2}, 1),
        ({"pipeline": 2, "microbatch": 3}, 1),
        full({}, 0),
        full({"tensor": 2, "loss_parallel": False}, 1),
        full({"shard": 2, "tensor": 2}, 2),
        full({"shard": 2, "cpu_offload": True}, 1),
        full({"pipeline": 2, "shard": 2, "microbatch": 1}, 3),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else f"rank {value}",
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool, tmp_path, given, rank):
    made = tiny.recipe(tmp_path, steps=STEPS, precision=Fp16(init_scale=1024.0), **given)
    run = tiny.begin(made)
    for told in pool.run(made.world, attempt, made, run, (BAD,), rank):
        assert told.kind is OutcomeKind.DONE
        assert [each.scaled.scale for each in told.totals] == [1024.0] * BAD + [512.0] * (STEPS - BAD)
        assert [each.scaled.skipped for each in told.totals] == [0] * (BAD - 1) + [1] * (STEPS - BAD + 1)
        assert [each.finite for each in told.totals] == [step != BAD for step in range(1, STEPS + 1)]
        # The loss was there all the time.
        assert all(math.isfinite(loss) for loss in told.trace.losses)
        for step in range(1, STEPS):
            same = [torch.equal(a, b) for a, b in zip(told.before[step], told.before[step + 1], strict=True)]
            assert all(same) if step == BAD else not any(same)
    rows = run.metrics("train")
    assert [row[meter.LOSS_SCALE] for row in rows] == [1024.0] * BAD + [512.0] * (STEPS - BAD)
    assert [row[meter.SKIPPED_STEPS] for row in rows] == [0] * (BAD - 1) + [1] * (STEPS - BAD + 1)
    assert rows[BAD - 1][meter.GRAD_NORM] is None


@pytest.mark.parametrize(
    ("precision", "bad_steps", "ends"),
    [
        (Fp16(init_scale=4.0, min_scale=2.0), (2, 3), 3),
        (Fp16(max_skips=2), (1, 3, 4), 4),
    ],
    ids=["smallest", "in a row"],
)
def test_what_no_scale_mends_is_the_end(pool, tmp_path, precision, bad_steps, ends):
    made = tiny.recipe(tmp_path, steps=STEPS, precision=precision, every=1, keep=0)
    run = tiny.begin(made)
    told = pool.run(1, attempt, made, run, bad_steps, 0)[0]
    assert (told.kind, told.step) == (OutcomeKind.NAN, ends)
    assert run.result().kind is OutcomeKind.NAN
    assert [path.name for path in checkpoints(run.checkpoints)] == [f"step-{step:08d}" for step in range(1, ends)]


def poisoned(made, run):
    watcher = Watcher(made.layout)
    look = watcher.after_step

    def after_step(step, totals):
        look(step, totals)
        if step == BAD:
            watcher.model.get_parameter("layers.0.feed_forward.w2.weight").data.to_local().fill_(math.nan)

    def with_gradients(step, model):
        watcher.model = model

    watcher.after_step, watcher.with_gradients = after_step, with_gradients
    outcome = tiny.as_rank(made, run, watcher)
    return outcome.kind, outcome.step


def test_a_loss_that_is_no_number_is_the_end_at_once(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, precision=Fp16())
    assert pool.run(1, poisoned, made, tiny.begin(made)) == [(OutcomeKind.NAN, BAD + 1)]


@pytest.mark.parametrize(
    "layout", [{}, full({"shard": 2}), full({"pipeline": 2, "tensor": 2, "microbatch": 3})], ids=str
)
def test_a_stopped_run_goes_on_bit_for_bit_with_its_scale(pool, tmp_path, layout):
    precision = Fp16(init_scale=256.0, growth_interval=2)
    given = {"steps": STEPS, "precision": precision, **layout}
    straight = tiny.recipe(tmp_path, name="straight", data=Planted(), **given)
    expected = pool.run(straight.world, attempt, straight, tiny.begin(straight))
    assert [each.scaled.scale for each in expected[0].totals] == [256, 256, 512, 512, 1024, 1024]
    # After an odd step: it is the count towards the next growth that has to be kept.
    made = tiny.recipe(tmp_path, name="stopped", data=Planted(fault="SIGINT", step=BAD), **given)
    run = tiny.begin(made)
    before = pool.run(made.world, attempt, made, run)
    made = tiny.changed(made, data=Planted())
    after = pool.run(made.world, attempt, made, tiny.begin(made, run))
    for rank, whole in enumerate(expected):
        assert (before[rank].kind, after[rank].kind) == (OutcomeKind.CANCELLED, OutcomeKind.DONE)
        assert [each._replace(stop=0) for each in before[rank].totals + after[rank].totals] == whole.totals
        found = after[rank].trace.parameters
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.trace.parameters.items())


def with_scale(made, run, init_scale):
    """Train in fp32 with a scaled loss."""

    def loss_scale(self, device):
        return DynamicLossScale(Fp16(init_scale=init_scale, growth_interval=2, max_skips=2), device)

    with patch.object(Cast, "loss_scale", loss_scale):
        return attempt(made, run)


@pytest.mark.parametrize(
    "given",
    [
        {"microbatch": 4, "max_grad_norm": 0.3, "data": Planted(gaps=True)},
        full({"shard": 2, "tensor": 2}),
        full({"pipeline": 2, "microbatch": 3}),
    ],
    ids=["single", "fsdp-tp", "pp"],
)
def test_powers_of_two_change_no_bit(pool, tmp_path, given):
    """Where nothing leaves a dtype's range, as in fp32: losses, norms, gradients and parameters are the same."""
    made = tiny.recipe(tmp_path, name="plain", steps=STEPS, **given)
    plain = pool.run(made.world, attempt, made, tiny.begin(made))[0]
    made = tiny.recipe(tmp_path, name="scaled", steps=STEPS, **given)
    scaled = pool.run(made.world, with_scale, made, tiny.begin(made), 2.0**20)[0]
    assert [each.scaled.scale for each in scaled.totals] == [2.0 ** (20 + step // 2) for step in range(STEPS)]
    assert plain.trace.losses == scaled.trace.losses
    assert plain.trace.grad_norms == scaled.trace.grad_norms
    for name, tensor in plain.trace.gradients.items():
        assert torch.equal(tensor, scaled.trace.gradients[name])
    for name, tensor in plain.trace.parameters.items():
        assert torch.equal(tensor, scaled.trace.parameters[name])

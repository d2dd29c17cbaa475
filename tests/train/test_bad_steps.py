"""Steps whose gradient is not finite: skipped by all ranks alike, or undone by going back to a checkpoint."""

import math
import os
import shutil
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.checkpoint.one_process import ALONE
from tests.precision.test_fp16 import Watcher, full
from tests.weights.saved import run_of, save
from titanlab.checkpoint.folders import checkpoints, step_folder
from titanlab.costs import meter
from titanlab.distributed import World
from titanlab.errors import ConfigError
from titanlab.launch import pass_over_damaged
from titanlab.parallelism import Gradients
from titanlab.recipe import Training
from titanlab.records import Outcome, OutcomeKind
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.techniques.precision.cast import DynamicLossScale, LossScale
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.train import Reduction
from titanlab.train.assemble import SkipBadSteps
from titanlab.train.train import Rollbacks

STEPS = 6
BAD = 3
NEAR = 1e-5


def attempt(made, run, bad_calls=(), bad_rank=0):
    """Train; at some calls, one gradient of one rank gets a NaN before the norm is computed."""
    watcher, calls = Watcher(made.layout), 0
    whole = Gradients.squared_norm

    def spoiled(self):
        nonlocal calls
        calls += 1
        if calls in bad_calls and int(os.environ["RANK"]) == bad_rank:
            gradient = next(p.grad for each in self._by_copies.values() for p in each if p.grad is not None)
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = math.nan
        return whole(self)

    with patch.object(Gradients, "squared_norm", spoiled):
        outcome = tiny.as_rank(made, run, watcher)
    states = [watcher.totals, watcher.before, watcher.trace.losses, watcher.trace.parameters]
    return outcome, *states


LAYOUTS = [
    {"shard": 2},
    full({"pipeline": 2, "tensor": 2, "microbatch": 3}),
    full({"replicate": 2}),
    full({"tensor": 2}),
    full({"context": 2}),
    full({"shard": 2, "cpu_offload": True}),
    full({"shard": 2, "replicate": 2}),
    full({"pipeline": 2, "shard": 2, "microbatch": 1}),
]


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """What one process does that skips the bad step."""
    made = tiny.recipe(tmp_path_factory.mktemp("alone"), steps=STEPS, on_nan="skip")
    return pool.run(1, attempt, made, tiny.begin(made), (BAD,))[0]


def test_one_process_skips_the_update_and_goes_on(alone):
    outcome, totals, before, losses, _ = alone
    assert (outcome.kind, outcome.step) == (OutcomeKind.DONE, STEPS)
    assert [each.finite for each in totals] == [step != BAD for step in range(1, STEPS + 1)]
    assert [each.scaled.skipped for each in totals] == [0, 0, 1, 1, 1, 1]
    assert all(map(math.isfinite, losses))
    for step in range(1, STEPS):
        same = [torch.equal(a, b) for a, b in zip(before[step], before[step + 1], strict=True)]
        assert all(same) if step == BAD else not any(same)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_skips_as_one_process_does(pool, tmp_path, alone, layout):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="skip", **layout)
    run = tiny.begin(made)
    _, _, _, expected, parameters = alone
    for outcome, totals, _, losses, _ in pool.run(made.world, attempt, made, run, (BAD,), made.world - 1):
        assert outcome.kind is OutcomeKind.DONE
        assert [each.scaled.skipped for each in totals] == [0, 0, 1, 1, 1, 1]
        assert losses == pytest.approx(expected, rel=NEAR)
    rows = run.metrics("train")
    assert [row[meter.SKIPPED_STEPS] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert meter.LOSS_SCALE not in rows[0]
    assert rows[BAD - 1][meter.GRAD_NORM] is None
    assert parameters


def test_an_optimizer_that_reads_no_flag_skips_too(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=4, on_nan="skip", optimizer=Muon())
    _, totals, before, *_ = pool.run(1, attempt, made, tiny.begin(made), (2,))[0]
    assert [each.scaled.skipped for each in totals] == [0, 1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(before[2], before[3], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[3], before[4], strict=True))


def test_too_many_bad_steps_in_a_row_are_the_end(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="skip", nan_limit=2)
    outcome, totals, *_ = pool.run(1, attempt, made, tiny.begin(made), (1, 3, 4, 5))[0]
    assert (outcome.kind, outcome.step, len(totals)) == (OutcomeKind.NAN, 5, 5)


def test_without_a_bad_step_the_policy_changes_no_bit(pool, tmp_path):
    runs = []
    for on_nan in ("stop", "skip", "rollback"):
        made = tiny.recipe(tmp_path, name=on_nan, steps=4, on_nan=on_nan, every=2)
        runs.append(pool.run(1, attempt, made, tiny.begin(made))[0])
    assert runs[0][3] == runs[1][3] == runs[2][3]
    for other in runs[1:]:
        assert all(torch.equal(runs[0][4][name], other[4][name]) for name in runs[0][4])


@pytest.mark.parametrize("layout", [{"shard": 2}, full({"pipeline": 2, "tensor": 2, "microbatch": 3})], ids=str)
def test_a_rollback_leaves_the_data_since_the_checkpoint_out(pool, tmp_path, layout):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="rollback", every=2, keep=0, name="back", **layout)
    run = tiny.begin(made)
    for outcome, totals, *_ in pool.run(made.world, attempt, made, run, (4,), made.world - 1):
        assert (outcome.kind, outcome.step, outcome.cause) == (OutcomeKind.DONE, STEPS, None)
        # Steps 1 to 4, and after the checkpoint of step 2 those from 3 on once more.
        assert len(totals) == 4 + 4
    assert [path.name for path in checkpoints(run.checkpoints)] == [f"step-{n:08d}" for n in (2, 4, 6)]
    log = (run.logs / "rank-0.log").read_text()
    assert "back to the checkpoint of step 2, without the data of steps 3 to 4 (rollback 1 of at most 3)" in log
    rows = run.metrics("train")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row[meter.LOSS] is not None for row in rows)
    # A run that was never bad, but had these sequences: its fifth step has the data of the third after the rollback.
    plain = tiny.recipe(tmp_path, steps=8, name="plain", **layout)
    straight = pool.run(made.world, attempt, plain, tiny.begin(plain))[0]
    assert totals[0:3] == straight[1][0:3]
    assert totals[4].loss != straight[1][2].loss


def test_a_run_that_has_gone_back_is_resumed_where_it_stood(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="rollback", every=2, keep=0)
    run = tiny.begin(made)
    _, totals, *_ = pool.run(1, attempt, made, run, (4,))[0]
    shutil.rmtree(step_folder(run.checkpoints, 6))
    warnings = []
    pass_over_damaged(run, made, warnings.append)
    assert not warnings
    _, again, *_ = pool.run(1, attempt, made, tiny.begin(made, run))[0]
    assert again == totals[-2:]


def test_a_rollback_that_does_not_help_is_the_end(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="rollback", nan_limit=2, every=1, saves="async")
    run = tiny.begin(made)
    outcome, *_ = pool.run(1, attempt, made, run, range(3, 100))[0]
    assert (outcome.kind, outcome.step, outcome.cause) == (OutcomeKind.NAN, 3, run.result().cause)
    assert (run.logs / "rank-0.log").read_text().count("back to the checkpoint of step 2") == 2


def test_without_a_checkpoint_there_is_no_way_back(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="rollback", every=4)
    run = tiny.begin(made)
    outcome, *_ = pool.run(1, attempt, made, run, (2,))[0]
    assert (outcome.kind, outcome.step) == (OutcomeKind.NAN, 2)
    assert "there is no checkpoint to go back to" in (run.logs / "rank-0.log").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_save_under_way_is_waited_for_and_counts(tmp_path):
    recipe, run = run_of(tmp_path)
    training = Training(steps=20, seq_len=32, global_batch=12, on_nan="rollback", nan_limit=1)
    bad = Outcome(kind=OutcomeKind.NAN, step=7, steps=20, cause="the loss of step 7 is nan")
    rollbacks = Rollbacks(training, run, ALONE, warn=pytest.fail)
    assert rollbacks.may_follow(bad, after=lambda: save(run, recipe.model, step=4))


def test_an_overflow_that_fp16_tolerates_is_no_bad_step():
    device = torch.device("cpu")
    scale = Fp16(init_scale=4.0, min_scale=2.0).implementation().loss_scale(device)
    assert isinstance(scale, DynamicLossScale)
    steps = SkipBadSteps(scale, limit=1, device=device)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    judged = []
    for value in (math.nan, math.nan, math.nan, 1.0):
        parameter.grad = torch.full((1,), value)
        fields = steps.judge(parameter.grad.norm().double())
        judged.append([*fields[:3].tolist(), bool(fields[3])])
        steps.step(optimizer)
    # At the smallest scale an overflow is a bad step: one of them is forgiven, a second one in a row is not.
    assert judged == [[4.0, 1.0, 1.0, True], [2.0, 2.0, 0.0, True], [2.0, 3.0, 0.0, False], [2.0, 3.0, 0.0, True]]
    assert parameter.item() == 0.0


def test_a_loss_that_is_not_finite_is_a_bad_step_also_where_an_overflow_is_none():
    device = torch.device("cpu")
    steps = SkipBadSteps(Fp16(init_scale=2.0**16).implementation().loss_scale(device), limit=1, device=device)
    judged = []
    for loss in (math.nan, 1.0, math.nan, math.inf):
        reduction = Reduction(
            World(rank=0, world=1, local_rank=0, device=device),
            squared_norm=torch.tensor(math.nan),
            loss_sum=torch.tensor(loss),
            tokens=1,
            stop=0,
            nominal_tokens=1,
            loss_scale=steps,
        )
        judged.append(reduction.read().lost)
    # The overflow between them neither counts nor ends the row.
    assert judged == [False, False, True, True]


def test_the_count_goes_on_after_a_checkpoint():
    device = torch.device("cpu")
    steps = SkipBadSteps(LossScale(), limit=1, device=device)
    assert steps.judge(torch.tensor(math.inf))[3]
    again = SkipBadSteps(LossScale(), limit=1, device=device)
    again.restore(steps.state())
    assert not again.judge(torch.tensor(math.inf))[3]
    assert again.state() == {"bad_row": 2, "bad_skipped": 2}


def test_rules(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.on_nan=ignore: no such choice; choose one of stop, skip"):
        tiny.recipe(tmp_path, on_nan="ignore")
    with pytest.raises(ConfigError, match=r"training\.nan_limit=-1: must not be negative"):
        tiny.recipe(tmp_path, nan_limit=-1)
    with pytest.raises(ConfigError, match=r"training\.on_nan=rollback: goes back to a checkpoint, and .* saves none"):
        tiny.recipe(tmp_path, on_nan="rollback")

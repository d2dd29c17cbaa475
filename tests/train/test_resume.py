"""A run that was stopped goes on as if it had not been: bit for bit under its layout, within 1e-5 under another."""

import os
import random
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests import tiny
from tests.planted_schema import Planted
from tests.pool import RankFailure
from titanlab.checkpoint import latest
from titanlab.checkpoint.folders import checkpoints
from titanlab.costs import meter
from titanlab.data import source
from titanlab.data.schema import Files, HuggingFace
from titanlab.prove import TrainingTrace, parity
from titanlab.records import OutcomeKind, RunFolder
from titanlab.techniques.compile.compiler import RECOMPILATIONS
from titanlab.techniques.precision.float8_schema import Float8Tensorwise

STEPS = 8
STOP = 3
BAR = 1e-5
SINGLE_AND_FSDP = [pytest.param({}, id="single"), pytest.param({"shard": 2}, id="fsdp", marks=pytest.mark.full)]


@dataclass(kw_only=True)
class Told:
    """What one rank tells of an attempt: its trace, its outcome, and what its generators gave by step."""

    trace: TrainingTrace
    kind: OutcomeKind
    step: int
    drawn: dict[int, tuple[float, ...]] = field(default_factory=dict)


class Drawer(parity.Tracer):
    """Draws from every generator after each step, on rank r so often that no two ranks stand at the same place."""

    def __init__(self, layout, *, raises_at=None):
        super().__init__(layout)
        self.drawn = {}
        self.raises_at = raises_at

    def after_step(self, step, totals):
        super().after_step(step, totals)
        for _ in range(int(os.environ["RANK"]) + 1):
            self.drawn[step] = (torch.rand(()).item(), random.random(), np.random.random())  # noqa: NPY002
        if step == self.raises_at:
            raise LookupError("a planted end")


def attempt(made, run, raises_at=None):
    drawer = Drawer(made.layout, raises_at=raises_at)
    outcome = tiny.as_rank(made, run, drawer)
    return Told(trace=drawer.trace, kind=outcome.kind, step=outcome.step, drawn=drawer.drawn)


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory):
    """Uninterrupted runs by layout."""
    folder = tmp_path_factory.mktemp("straight")
    known = {}

    def train(**layout):
        key = str(layout)
        if key not in known:
            made = tiny.recipe(folder, name=f"run-{len(known)}", steps=STEPS, data=Planted(), **layout)
            known[key] = pool.run(made.world, attempt, made, tiny.begin(made))
        return known[key]

    return train


def stopped(pool, folder, **given):
    """A run that asked itself to stop at step STOP, and its recipe without that fault."""
    fault = Planted(fault="SIGINT", step=STOP, rank=given.get("shard", 1) - 1)
    made = tiny.recipe(folder, steps=STEPS, data=fault, **given)
    run = tiny.begin(made)
    told = pool.run(made.world, attempt, made, run)
    assert [(each.kind, each.step) for each in told] == [(OutcomeKind.CANCELLED, STOP)] * made.world
    assert latest(run.checkpoints).name == f"step-{STOP:08d}"
    assert run.result(1).kind is OutcomeKind.CANCELLED
    assert (run.status().state, run.status().step) == ("ended", STOP)
    return tiny.changed(made, data=Planted()), run, told


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="single", marks=pytest.mark.full),
        pytest.param({"shard": 2}, id="fsdp"),
        pytest.param({"pipeline": 2, "tensor": 2, "microbatch": 3}, id="pipeline-tensor", marks=pytest.mark.full),
        pytest.param({"shard": 2, "context": 2}, id="fsdp-context", marks=pytest.mark.full),
        pytest.param({"replicate": 4}, id="ddp", marks=pytest.mark.full),
        pytest.param({"replicate": 2, "shard": 2}, id="hsdp", marks=pytest.mark.full),
        # Scales are computed before the first step, too.
        pytest.param(
            {"shard": 2, "precision": Float8Tensorwise()}, id="float8", marks=[pytest.mark.full, pytest.mark.covering]
        ),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(pool, straight, tmp_path, layout):
    made, run, before = stopped(pool, tmp_path, **layout)
    after = pool.run(made.world, attempt, made, tiny.begin(made, run))
    for rank, expected in enumerate(straight(**layout)):
        assert (after[rank].kind, after[rank].step) == (OutcomeKind.DONE, STEPS)
        assert before[rank].trace.losses + after[rank].trace.losses == expected.trace.losses
        assert before[rank].trace.grad_norms + after[rank].trace.grad_norms == expected.trace.grad_norms
        assert same_bits(after[rank].trace.parameters, expected.trace.parameters)
        assert before[rank].drawn | after[rank].drawn == expected.drawn
    # Ranks did not share one generator's state.
    if made.world > 1:
        assert after[0].drawn[STEPS] != after[1].drawn[STEPS]


@pytest.mark.parametrize("layout", SINGLE_AND_FSDP)
def test_a_run_that_died_goes_on_from_its_last_checkpoint(pool, straight, tmp_path, layout):
    made = tiny.recipe(tmp_path, steps=STEPS, data=Planted(), every=2, **layout)
    run = tiny.begin(made)
    with pytest.raises(RankFailure, match="a planted end"):
        pool.run(made.world, attempt, made, run, 5)
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-00000002", "step-00000004"]
    # What a death in the middle of saving leaves.
    (run.checkpoints / "step-00000005.part").mkdir()
    (run.checkpoints / "step-00000005.part" / "rank-00000.safetensors").write_bytes(b"torn")
    (run.checkpoints / "step-00000006").mkdir()
    after = pool.run(made.world, attempt, made, tiny.begin(made, run))
    for rank, expected in enumerate(straight(**layout)):
        assert after[rank].trace.losses == expected.trace.losses[4:]
        assert same_bits(after[rank].trace.parameters, expected.trace.parameters)
    # The last two are kept, and nothing unfinished.
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000006", "step-00000008"]
    assert checkpoints(run.checkpoints)[-1].name == "step-00000008"
    _each_step_once(run, resumed=[0, 4])
    # An attempt ends after its last row, which is rounded to milliseconds.
    last = max(row["time"] for row in run.metrics("train") if row["attempt"] == 2)
    assert run.result(2).ended > last - 0.001
    assert (run.result().kind, run.result().step, run.result().attempt) == (OutcomeKind.DONE, STEPS, 2)


def _each_step_once(run, *, resumed):
    rows = run.metrics("train")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["n_tokens_seen"] for row in rows] == [step * 12 * 32 for step in range(1, STEPS + 1)]
    assert [(row["attempt"], row["step"]) for row in run.metrics("attempt")] == list(enumerate(resumed, start=1))
    assert [row["attempt"] for row in rows] == [1 if step <= resumed[-1] else 2 for step in range(1, STEPS + 1)]
    assert run.attempts() == [1, 2]


RESULTS = (meter.LOSS, meter.VALIDATION_LOSS, meter.GRAD_NORM, meter.LEARNING_RATE, meter.TOKENS_SEEN)


def results(run):
    """What must not depend on interruptions, by kind and step."""
    rows = run.metrics("train") + run.metrics("validation")
    return [(row["kind"], row["step"], {name: row[name] for name in RESULTS if name in row}) for row in rows]


@pytest.mark.parametrize(
    "given",
    [
        {"log_every": 4},
        pytest.param({"shard": 2}, marks=pytest.mark.full),
        # A pipeline and compiled blocks, whose first call is then without gradients.
        pytest.param({"pipeline": 2, "shard": 2, "microbatch": 2}, marks=pytest.mark.full),
        pytest.param({"blocks": True, "backend": "aot_eager", "fused": True}, marks=pytest.mark.full),
    ],
)
def test_a_validation_that_a_stop_came_before_is_made_up_for(pool, tmp_path, given):
    """The stop ends step 3, at which a validation is due: the run saves first, and validates when it goes on."""
    given = {"validate_every": 3, "validation_sequences": 4, **given}
    made, run, _ = stopped(pool, tmp_path, **given)
    assert run.metrics("validation") == []
    straight = tiny.recipe(tmp_path, name="straight", steps=STEPS, data=Planted(), **given)
    whole = tiny.begin(straight)
    pool.run(made.world, attempt, straight, whole)
    pool.run(made.world, attempt, made, tiny.begin(made, run))
    assert [row["step"] for row in run.metrics("validation")] == [3, 6, 8]
    assert results(run) == results(whole)
    assert run.result().metrics.get(RECOMPILATIONS, 0) == 0


def test_no_validation_is_repeated(pool, tmp_path):
    """Neither the one before a checkpoint, nor that of the run from which another one starts."""
    given = {"steps": STEPS, "data": Planted(), "validate_every": 3, "validation_sequences": 4, "every": 3}
    made = tiny.recipe(tmp_path, **given)
    run = tiny.begin(made)
    with pytest.raises(RankFailure, match="a planted end"):
        pool.run(1, attempt, made, run, 5)
    first = latest(run.checkpoints)
    other = tiny.recipe(tmp_path, name="other", load_from=str(first), **given)
    begun = tiny.begin(other)
    pool.run(1, attempt, other, begun)
    assert [row["step"] for row in begun.metrics("validation")] == [6, 8]
    pool.run(1, attempt, made, tiny.begin(made, run))
    rows = [(row["attempt"], row["step"]) for row in run.metrics("validation")]
    assert (first.name, rows) == ("step-00000003", [(1, 3), (2, 6), (2, 8)])


def test_an_attempt_with_nothing_left_to_do_ends_well(pool, tmp_path):
    """The process died between the last checkpoint and the result."""
    made = tiny.recipe(tmp_path, steps=2)
    run = tiny.begin(made)
    pool.run(1, attempt, made, run)
    tiny.begin(made, run)
    assert run.result() is None
    assert pool.run(1, attempt, made, run)[0].kind is OutcomeKind.DONE
    assert (run.result().step, run.result().attempt) == (2, 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.corpus(tmp_path_factory.mktemp("corpus"))


def real_data(kind, corpus):
    # No validation documents: nothing but the training stream is of interest here.
    text = {"vocab_size": 320, "validation_fraction": 0.0, "document_mask": True}
    if kind == "files":
        return Files(files=str(corpus / "*.jsonl"), **text)
    return HuggingFace(
        path="json", data_files=[str(corpus / "*.jsonl")], streams=4, validation_documents=0, prefetch=2, **text
    )


@pytest.mark.parametrize("kind", ["files", pytest.param("hf", marks=pytest.mark.full)])
def test_the_position_in_real_data_is_resumed(pool, tmp_path, corpus, monkeypatch, kind):
    monkeypatch.setenv("TITANLAB_CACHE", str(corpus / "cache"))
    data = real_data(kind, corpus)
    source.prepare(data, report=lambda line: None)

    def train(made, run, raises_at=None):
        told = pool.run(made.world, attempt_with_cache, str(corpus / "cache"), made, run, raises_at)
        return told[0].trace

    given = {"data": data, "steps": 6, "vocab_size": 320, "global_batch": 4, "shard": 2}
    made = tiny.recipe(tmp_path, name="straight", **given)
    expected = train(made, tiny.begin(made))
    # Other tokens give other losses: two steps that are alike would prove nothing.
    assert len(set(expected.losses)) == 6
    made = tiny.recipe(tmp_path, name="resumed", every=2, **given)
    run = tiny.begin(made)
    with pytest.raises(RankFailure, match="a planted end"):
        train(made, run, raises_at=3)
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "copy"))
    same = train(made, tiny.begin(made, run))
    assert same.losses == expected.losses[2:]
    assert same_bits(same.parameters, expected.parameters)
    made = tiny.changed(made, shard=1)
    assert train(made, tiny.begin(made, copy)).losses == pytest.approx(expected.losses[2:], rel=BAR)


def attempt_with_cache(cache, made, run, raises_at):
    os.environ["TITANLAB_CACHE"] = cache
    return attempt(made, run, raises_at)

"""The loop: how it ends, what it validates, what it repeats bit for bit, what it writes down."""

import gc
import math
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.planted_schema import Planted
from titanlab.checkpoint.folders import checkpoints
from titanlab.costs import meter
from titanlab.data import source
from titanlab.data.schema import Files
from titanlab.distributed import StopRequest
from titanlab.prove import parity
from titanlab.records import Outcome, OutcomeKind
from titanlab.techniques.model.llama import LlamaModel
from titanlab.techniques.model.llama_schema import Llama as LlamaConfig
from titanlab.train import Totals
from titanlab.train import train as story


class Poison(parity.Tracer):
    """Makes one rank's part of a parameter NaN after a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def with_gradients(self, step, model):
        super().with_gradients(step, model)
        self.model = model

    def after_step(self, step, totals):
        super().after_step(step, totals)
        if step == self.step and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            part = self.model.get_parameter("layers.0.feed_forward.w2.weight").data
            getattr(part, "_local_tensor", part).fill_(math.nan)


def poisoned(made, run):
    tracer = Poison(3)
    outcome = tiny.as_rank(made, run, tracer)
    return outcome.kind, outcome.step, outcome.cause, len(tracer.trace.losses)


@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="single", marks=pytest.mark.full), pytest.param({"shard": 2}, id="fsdp")]
)
def test_a_loss_that_is_no_number_ends_the_run_unsaved(pool, tmp_path, layout):
    made = tiny.recipe(tmp_path, every=2, **layout)
    run = tiny.begin(made)
    for kind, step, cause, steps in pool.run(made.world, poisoned, made, run):
        assert (kind, step, steps) == (OutcomeKind.NAN, 4, 4)
        assert cause == "step 4: loss nan, gradient norm nan"
    # Step 4 is one at which a checkpoint was due.
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-00000002"]
    assert (run.result().kind, run.result().step) == (OutcomeKind.NAN, 4)
    assert run.result().kind.exit_code == 72
    last = run.metrics("train")[-1]
    assert (last["step"], last[meter.LOSS], last[meter.GRAD_NORM]) == (4, None, None)


def judged(outcome, *totals):
    for step, each in enumerate(totals, start=1):
        outcome = story._judge(outcome, step, each, StopRequest())
    return outcome.kind


def test_what_is_no_number_counts_also_after_a_wish_to_stop():
    """On a GPU the step after the one that told of a stop is over when it is read."""
    running = Outcome(kind=OutcomeKind.DONE)
    good, stop, bad = Totals(1.0, 1.0, 5, 0), Totals(1.0, 1.0, 5, signal.SIGINT), Totals(math.nan, 1.0, 5, 0)
    assert judged(running, good, good) is OutcomeKind.DONE
    assert judged(running, stop, good) is OutcomeKind.CANCELLED
    assert judged(running, stop, bad) is OutcomeKind.NAN
    assert judged(running, bad, stop) is OutcomeKind.NAN
    assert judged(running, good, good._replace(stop=signal.SIGTERM)) is OutcomeKind.PREEMPTED
    assert judged(running, stop, good._replace(stop=signal.SIGTERM)) is OutcomeKind.CANCELLED
    # After the last step there is nothing left to stop.
    assert judged(replace(running, steps=2), good, stop) is OutcomeKind.DONE


def ended(made, run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    outcome = tiny.as_rank(made, run)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    return outcome.kind, outcome.step


@pytest.mark.parametrize(
    ("fault", "rank", "kind"),
    [("SIGINT", 0, OutcomeKind.CANCELLED), ("SIGTERM", 1, OutcomeKind.PREEMPTED)],
)
def test_a_stop_of_any_rank_stops_all_at_one_step_and_saves(pool, tmp_path, fault, rank, kind):
    made = tiny.recipe(tmp_path, shard=2, data=Planted(fault=fault, step=4, rank=rank))
    run = tiny.begin(made)
    assert pool.run(2, ended, made, run) == [(kind, 4)] * 2
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-00000004"]
    assert run.result().cause.endswith("the run can be resumed")


def test_tokens_that_were_seen_are_labels_that_count(pool, tmp_path):
    """Of 12 sequences of 32 labels a third counts in full, and of the others two thirds, a third and nothing."""
    made = tiny.recipe(tmp_path, shard=2, steps=3, data=Planted(gaps=True))
    run = tiny.begin(made)
    pool.run(2, ended, made, run)
    assert [row[meter.TOKENS_SEEN] for row in run.metrics("train")] == [195, 390, 585]


def validated(cache, made, run):
    os.environ["TITANLAB_CACHE"] = cache
    tracer = parity.Tracer(made.layout)
    tiny.as_rank(made, run, tracer)
    return tracer.trace


def validation_losses(run):
    return [(row["step"], row[meter.VALIDATION_LOSS]) for row in run.metrics("validation")]


VALIDATED = {
    "ddp": {"replicate": 2, "microbatch": 2},
    "fsdp": {"shard": 3, "reshard_after_forward": "never", "microbatch": 4},
    # An odd number of sequences, which the tokens of a microbatch must not depend on; a last batch with holes.
    "tensor-context": {"tensor": 2, "context": 2, "microbatch": 4},
    "pipeline": {"pipeline": 2, "shard": 2, "microbatch": 2},
    "pipeline-tensor": {"pipeline": 2, "tensor": 2, "microbatch": 2},
    "pipeline-context": {"pipeline": 2, "context": 2, "microbatch": 2},
}


@pytest.fixture(scope="module")
def held_out(pool, tmp_path_factory):
    """Trains a layout on documents of which 17 sequences are held out, the last of them short: `held_out(name, layout)`.

    Returns the data, the trace, and the validation losses by step.
    """
    folder = tmp_path_factory.mktemp("validated")
    data = Files(files=str(tiny.corpus(folder) / "*.jsonl"), vocab_size=320, validation_fraction=0.015)
    given = {"data": data, "vocab_size": 320, "global_batch": 12, "steps": 3}
    given |= {"validate_every": 2, "validation_sequences": 100}
    cache = str(folder / "cache")
    known = {}

    def train(name, layout):
        if name not in known:
            made = tiny.recipe(folder, name=name, **given, **layout)
            run = tiny.begin(made)
            trace = pool.run(made.world, validated, cache, made, run)[0]
            known[name] = data, trace, validation_losses(run)
        return known[name]

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TITANLAB_CACHE", cache)
        source.prepare(data, report=lambda line: None)
        yield train


def test_the_validation_loss_is_the_mean_over_all_labels_that_are_held_out(held_out):
    """In plain PyTorch: each sequence by itself, with the parameters of the run's end."""
    data, trace, losses = held_out("single", {})
    model = LlamaModel(LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=320), seq_len=32)
    model.load_state_dict(trace.parameters)
    rows = source.open_validation(data, seq_len=32, sequences=100, rank=0, ranks=1)
    tokens, labels = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    assert [int((row != source.IGNORE).sum()) for row in labels] == [32] * 16 + [23]
    with torch.no_grad():
        logits = torch.cat([model(row.unsqueeze(0)) for row in tokens])
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    # Every second step, and the last.
    assert [step for step, _ in losses] == [2, 3]
    assert losses[-1] == (3, pytest.approx(wanted, rel=1e-6))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "pipeline-tensor" else [pytest.mark.full]) for name in VALIDATED],
)
def test_validation_is_the_same_for_any_number_of_ranks(held_out, name):
    """17 sequences do not come out even for two or three ranks."""
    *_, single = held_out("single", {})
    *_, losses = held_out(name, VALIDATED[name])
    assert losses == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in single]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="single", marks=pytest.mark.full),
        pytest.param({"shard": 2}, id="fsdp"),
        pytest.param(
            {"shard": 2, "reshard_after_forward": "never", "bf16": True}, id="bf16-never", marks=pytest.mark.full
        ),
        pytest.param({"replicate": 2, "microbatch": 2}, id="ddp", marks=pytest.mark.full),
    ],
)
def test_validation_changes_nothing(pool, tmp_path, layout):
    traces = []
    for every in (0, 1):
        made = tiny.recipe(
            tmp_path, name=f"every-{every}", steps=4, validate_every=every, validation_sequences=5, **layout
        )
        run = tiny.begin(made)
        traces.append(pool.run(made.world, validated, "", made, run)[0])
        assert len(validation_losses(run)) == 4 * every
    assert traces[0].losses == traces[1].losses
    for name, parameter in traces[0].parameters.items():
        # Also what an observer sees in the end: the masters, in fp32.
        assert parameter.dtype == traces[1].parameters[name].dtype == torch.float32
        assert torch.equal(parameter, traces[1].parameters[name])


class Deterministic(parity.Tracer):
    def with_gradients(self, step, model):
        assert torch.are_deterministic_algorithms_enabled()
        super().with_gradients(step, model)


def deterministic(made, run):
    tracer = Deterministic()
    tiny.as_rank(made, run, tracer)
    assert not torch.are_deterministic_algorithms_enabled()
    return tracer.trace


def test_deterministic_runs_are_equal_bit_for_bit(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=3, shard=2, deterministic=True)
    first, second = (
        pool.run(2, deterministic, each, tiny.begin(each))[0] for each in (made, replace(made, name="again"))
    )
    assert first.losses == second.losses
    for kind in ("gradients", "parameters"):
        for name, tensor in getattr(first, kind).items():
            assert torch.equal(tensor, getattr(second, kind)[name])


class Collections(story.Observer):
    """Counts garbage collections between the data of a step and its gradients."""

    def __init__(self):
        self.enabled, self.between = [], []

    def with_gradients(self, step, model):
        self.enabled.append(gc.isenabled())
        self.between.append([each["collections"] for each in gc.get_stats()][:2])


def collected(made, run):
    observer = Collections()
    tiny.as_rank(made, run, observer)
    return gc.isenabled(), observer.enabled, observer.between


def test_garbage_is_collected_between_steps_only(pool, tmp_path):
    made = tiny.recipe(tmp_path, gc_every=4)
    after, enabled, counts = pool.run(1, collected, made, tiny.begin(made))[0]
    assert after
    assert enabled == [False] * 10
    # The older generation is collected after steps 4 and 8 only.
    assert [counts[step][1] - counts[0][1] for step in range(10)] == [0] * 4 + [1] * 4 + [2] * 2
    assert [counts[step][0] - counts[0][0] for step in range(10)] == [0] * 10


DOCUMENTED = {
    *["kind", "step", "attempt", "time", meter.LOSS, "grad_norm", "lr", "n_tokens_seen", "throughput(tps)", "tflops"],
    *["mfu(%)", "time_metrics/end_to_end(s)", "time_metrics/end_to_end_median(s)", "time_metrics/data_loading(s)"],
    *["time_metrics/data_loading(%)", "warming_up", "memory/max_resident(GiB)"],
}


# After the last step, the ranks are compared.
COMPARED = {
    *("straggler/rank", "straggler/slower(%)", "straggler/data(s)", "straggler/compute(s)"),
    *("memory/max_over_ranks(GiB)", "memory/max_rank"),
}


def test_rows_have_the_documented_names_and_mark_what_is_not_measured(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=11, log_every=4, unmeasured_steps=5, shard=2)
    run = tiny.begin(made)
    pool.run(2, ended, made, run)
    rows = run.metrics("train")
    assert [set(row) for row in rows] == [DOCUMENTED] * 3 + [DOCUMENTED | COMPARED]
    # The first step, every fourth, and the last.
    assert [row["step"] for row in rows] == [1, 4, 8, 11]
    assert [row["warming_up"] for row in rows] == [True, True, True, False]
    assert [row["n_tokens_seen"] for row in rows] == [384, 1536, 3072, 4224]
    assert rows[0]["lr"] == pytest.approx(0.5e-3)
    for row in rows:
        assert 0 < row["time_metrics/data_loading(s)"] < row["time_metrics/end_to_end(s)"] < 60
        assert row["throughput(tps)"] == pytest.approx(384 / row["time_metrics/end_to_end(s)"] / 2)
        assert row["mfu(%)"] == pytest.approx(100 * row["tflops"])  # The peak was given as 1 TFLOP/s.
    summary = run.result().metrics
    assert summary["measured_steps"] == 6
    assert summary["first_loss"] == rows[0][meter.LOSS]
    assert summary[meter.LOSS] == rows[-1][meter.LOSS]
    assert summary["peak_tflops"] == 1.0


@pytest.mark.parametrize(("seconds", "end"), [(0.0, "cancelled"), (1.1, "KeyboardInterrupt")])
def test_a_second_signal_does_not_wait_but_for_an_echo_of_the_first(pool, tmp_path, seconds, end):
    made = tiny.recipe(tmp_path)
    assert pool.run(1, interrupted_twice, made, tiny.begin(made), seconds) == [end]


class Signals(story.Observer):
    count, seconds = 2, 0.0

    def with_gradients(self, step, model):
        for _ in range(self.count):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(self.seconds)


def interrupted_twice(made, run, seconds):
    observer = Signals()
    observer.seconds = seconds
    try:
        return tiny.as_rank(made, run, observer).kind.value
    except KeyboardInterrupt as error:
        return type(error).__name__


def test_the_seed_reaches_every_generator(pool, tmp_path):
    """Two runs of one seed draw the same, and those of another seed do not."""
    drawn = []
    for number, seed in enumerate((3, 3, 4)):
        made = tiny.recipe(tmp_path, name=f"run-{number}", steps=2, seed=seed)
        drawn.append(pool.run(1, draws, made, tiny.begin(made))[0])
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


class Draws(story.Observer):
    def at_end(self, model):
        import random

        self.found = (torch.rand(()).item(), random.random(), np.random.random())  # noqa: NPY002


def draws(made, run):
    observer = Draws()
    tiny.as_rank(made, run, observer)
    return observer.found

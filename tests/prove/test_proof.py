"""Proofs pass recipes that train the same, and find what does not.

The faults are those that were published, or that happened here: each leaves a run that trains, and whose loss looks
right for a while. A recipe is reduced by the verb's own rules; only its ranks are those of the pool.
"""

import json
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests import tiny
from tests.prove.planted_faults import traced
from titanlab.errors import ConfigError, TitanlabError
from titanlab.options import discover
from titanlab.prove import (
    FAILED,
    Candidate,
    ProofRow,
    Prover,
    RunFailed,
    TrainingTrace,
    forked,
    plan_proofs,
    prepare,
    proof,
    read_parity,
    reduce_all,
    rehearse,
    tolerances,
    write_parity,
)
from titanlab.prove.forked import Ended
from titanlab.prove.parity import TraceDifference
from titanlab.prove.proof import OK, exceeded, too_exact
from titanlab.prove.tolerances import FP32, RUNS
from titanlab.records import Outcome, OutcomeKind, RunFolder
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8Tensorwise
from titanlab.techniques.schedule.published_schema import ZBV, Interleaved1F1B

# A model that only its reduction makes trainable here.
LARGE = {
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "ffn_dim": 14336,
    "vocab_size": 128256,
    "rope_factor": 8.0,
    "rope_theta": 500000.0,
}


def large(runs, **given):
    """A candidate in its real size."""
    model = Llama(**{**LARGE, **{key: given.pop(key) for key in list(given) if key in Llama.__dataclass_fields__}})
    made = tiny.recipe(runs, model=model, **{"seq_len": 8192, "global_batch": 16, **given})
    return Candidate(run=made.layout.label, recipe=made)


@pytest.fixture
def rows_of(pool, tmp_path):
    """The rows of some candidates, with a fault in the ranks of all but the references."""

    def rows(*candidates, fault="", steps=3, most=16):
        def train(recipe):
            return pool.run(recipe.layout.world, traced, recipe, tiny.begin(recipe), fault, limit_seconds=200)

        prover = Prover(train)
        proofs = plan_proofs(candidates, steps=steps, runs=str(tmp_path), most=most)
        return [row for proof in proofs for row in prover.rows(proof)]

    return rows


@pytest.mark.parametrize(
    "given",
    [
        {"shard": 2},
        pytest.param({"tensor": 2, "shard": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "shard": 2, "microbatch": 1}, marks=pytest.mark.full),
        pytest.param({"context": 2, "precision": Bf16()}, marks=pytest.mark.full),
        pytest.param({"replicate": 2, "shard": 2, "tensor": 2, "microbatch": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "tensor": 2, "pipeline_schedule": ZBV()}, marks=pytest.mark.full),
        pytest.param({"shard": 2, "tensor": 2, "precision": Float8Rowwise()}, marks=pytest.mark.full),
        pytest.param({"shard": 2, "pipeline": 2, "context": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param(
            {"shard": 64, "pipeline": 8, "context": 4, "tensor": 8, "pipeline_schedule": Interleaved1F1B(),
             "global_batch": 512, "vocab_size": 128250},
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda given: " ".join(f"{key}={getattr(value, 'kind', value)}" for key, value in given.items()),
)  # fmt: skip
def test_what_trains_the_same_passes(rows_of, tmp_path, given):
    candidate = large(tmp_path, **given)
    rows = rows_of(candidate)
    assert all(row.passed for row in rows), rows
    first = rows[0]
    assert first.precision == "fp32"
    assert max(first.loss, first.grad_norm, first.gradient[0], first.parameter[0]) <= tolerances.FP32
    assert first.gradient[0] > 0
    precision = candidate.recipe.precision.kind
    assert [row.precision for row in rows] == (["fp32"] if precision == "fp32" else ["fp32", precision])


COVERING = [pytest.mark.full, pytest.mark.covering]


@pytest.mark.parametrize(
    ("fault", "given", "precision", "found"),
    [
        ("not divided", {"shard": 2, "microbatch": 4}, "fp32", "grad norm differs by 1.0e+00"),
        ("norms not summed", {"tensor": 2}, "fp32", "norm.weight), more than"),
        ("values permuted", {"tensor": 2}, "fp32", "gradient differs by"),
        ("clipped by local norm", {"shard": 2}, "fp32", "gradient differs by"),
        pytest.param(
            "clipped by local norm",
            {"pipeline": 2, "microbatch": 1},
            "fp32",
            "gradient differs by",
            marks=pytest.mark.full,
        ),
        ("without positions", {"context": 2}, "fp32", "loss differs by"),
        ("pipeline not normalised", {"pipeline": 2, "microbatch": 1}, "fp32", "grad norm differs by"),
        pytest.param(
            "embedding loses gradient",
            {"shard": 2, "blocks": True, "backend": "eager"},
            "fp32",
            "(tok_embeddings.weight)",
            marks=COVERING,
        ),
        pytest.param(
            "float8 labelled bf16",
            {"shard": 2, "precision": Bf16()},
            "bf16",
            "is Float8Linear, and precision=bf16",
            marks=COVERING,
        ),
        pytest.param(
            "bf16 labelled float8",
            {"shard": 2, "precision": Float8Tensorwise(all_gather=False)},
            "float8_tensorwise",
            "is Linear, and precision=float8_tensorwise makes it Float8Linear",
            marks=pytest.mark.full,
        ),
        ("one rank alone", {"tensor": 2}, "fp32", "(norm.weight), more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_found(rows_of, tmp_path, fault, given, precision, found):
    rows = {row.precision: row for row in rows_of(large(tmp_path, **given), fault=fault)}
    assert not rows[precision].passed
    assert found in rows[precision].reason
    if precision != "fp32":
        # In fp32 the layout itself is right.
        assert rows["fp32"].passed, rows["fp32"]


def test_what_the_numbers_alone_show_of_a_precision(tmp_path):
    recipe = large(tmp_path, precision=Bf16()).recipe
    near, far = (TraceDifference(loss=0, grad_norm=0, gradient=(by, "a"), parameter=(0, "a")) for by in (1e-5, 1e-2))
    assert "the recipe computes in another precision" in too_exact(recipe, near, far)
    assert not too_exact(recipe, far, far)


def test_a_difference_that_is_not_a_number_exceeds_every_tolerance():
    difference = TraceDifference(loss=float("nan"), grad_norm=0, gradient=(0, "a"), parameter=(float("inf"), "b"))
    limits = dict.fromkeys(("loss", "grad_norm", "gradient", "parameter"), 1.0)
    assert (
        exceeded(difference, limits)
        == "loss differs by nan, more than 1.0e+00; parameter differs by inf (b), more than 1.0e+00"
    )


def untrained(failing=()):
    """Trains nothing: every trace is the same; recipes with such a world fail."""
    calls = []

    def train(recipe):
        calls.append(recipe)
        if recipe.layout.world in failing:
            raise TitanlabError("crash: LookupError: a planted fault")
        tensors = {"a": torch.ones(2)}
        return [
            TrainingTrace(losses=[1.0], grad_norms=[1.0], gradients=tensors, parameters=tensors)
        ] * recipe.layout.world

    return train, calls


def test_equal_recipes_and_references_are_trained_once(tmp_path):
    train, calls = untrained()
    prover = Prover(train)
    first = large(tmp_path, shard=2)
    candidates = [first, Candidate(run="again", recipe=first.recipe), large(tmp_path, tensor=2)]
    rows = [row for proof in plan_proofs(candidates, steps=2, runs="x", most=16) for row in prover.rows(proof)]
    assert [row.run for row in rows] == ["dp_s2", "again", "tp2"]
    assert all(row.passed for row in rows)
    assert [recipe.layout.label for recipe in calls] == ["single", "dp_s2", "tp2"]


def test_what_cannot_be_reduced_is_a_row_beside_others_and_an_error_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Llama, "reduced", lambda self, sizes: None)
    hopeless, small = large(tmp_path, shard=2), Candidate(run="small", recipe=tiny.recipe(tmp_path, shard=2))
    with pytest.raises(ConfigError, match="model=llama: has 8,030,261,248 parameters, and its config has no method"):
        plan_proofs([hopeless], steps=2, runs="x", most=16)
    proofs = plan_proofs([hopeless, small], steps=2, runs="x", most=16)
    assert proofs[0].recipe is None
    assert proofs[1].notes == ("model=llama is not reduced, and keeps 131,392 parameters",)
    (row,) = Prover(untrained()[0]).rows(proofs[0])
    assert row == ProofRow(run="dp_s2", layout="dp_s2", precision="", passed=False, reason=str(proofs[0].error))


@dataclass(frozen=True, kw_only=True)
class Narrow(Bf16):
    """A precision of another package whose name says nothing about its bits."""

    kind: str = "narrow"

    def product_bits(self) -> int:
        return 6


@pytest.mark.parametrize("kind", discover()["precision"])
def test_runs_have_the_tolerance_of_the_bits_that_are_multiplied(kind):
    bits = {"fp32": "fp32", "bf16": "16 bits", "bf16_full": "16 bits", "fp16": "16 bits"}
    assert tolerances.of_runs(discover()["precision"][kind].schema()) == RUNS[bits.get(kind, "float8")]


def test_another_packages_precision_has_the_tolerance_of_its_bits():
    assert tolerances.of_runs(Narrow()) == RUNS["float8"]


def test_tolerances_in_fewer_bits_follow_the_distance_of_one_process_from_fp32():
    distances = {"loss": 1e-4, "grad_norm": 1e-3, "gradient": 1e-2, "parameter": 0.0}
    found = tolerances.in_fewer_bits(discover()["optimizer"]["adamw"].schema(), distances)
    # Losses and norms may be near by chance, but not nearer than a quarter of the gradients' distance.
    assert found == pytest.approx({"loss": 5e-3, "grad_norm": 5e-3, "gradient": 2e-2, "parameter": FP32})


def test_an_optimizer_that_rounds_more_says_so():
    class Rounding(discover()["optimizer"]["adamw"].schema):
        tolerances: ClassVar[Mapping[str, float]] = {"parameter": 0.5}

    assert tolerances.in_fp32(Rounding()) == {"loss": FP32, "grad_norm": FP32, "gradient": FP32, "parameter": 0.5}
    assert tolerances.in_fp32(discover()["optimizer"]["muon"].schema())["parameter"] == 3e-3


PROVED = ProofRow(
    run="a-12345678", layout="dp_s2", precision="fp32", passed=True, loss=1e-7, gradient=(2e-7, "w"), tolerance=1e-5
)


def proved(run, **changes):
    return replace(PROVED, run=run, **changes)


def test_rows_are_written_and_read(tmp_path):
    sweep = tmp_path / "runs" / "layouts"
    assert read_parity(tmp_path) is None
    assert write_parity(sweep, [proved("a")], reference="one process") == sweep / "parity.json"
    content = json.loads((sweep / "parity.json").read_text())
    assert content.keys() == {"schema", "time", "reference", "rows"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", content["time"])
    (row,) = content["rows"]
    assert (row["run"], row["gradient"], row["parameter"], row["tolerance"]) == ("a", [2e-7, "w"], None, 1e-5)
    assert read_parity(sweep).rows == (proved("a"),)
    write_parity(sweep, [proved("a", loss=float("inf"), gradient=(float("nan"), "w"))], reference="one process")
    assert read_parity(sweep).rows == (proved("a", loss=None, gradient=(None, "w")),)


def test_rows_of_runs_that_were_proved_again_replace_the_earlier_ones(tmp_path):
    write_parity(tmp_path, [proved("a"), proved("a", precision="bf16"), proved("b")], reference="x")
    write_parity(tmp_path, [proved("a", passed=False), proved("c")], reference="x")
    assert read_parity(tmp_path).rows == (proved("b"), proved("a", passed=False), proved("c"))


def test_two_commands_that_write_at_once_lose_no_rows(tmp_path, monkeypatch):
    write_parity(tmp_path, [], reference="x")
    threads = []
    write = proof.write_typed

    def slowly(path, value, *, schema):
        if not threads:
            threads.append(
                threading.Thread(target=write_parity, args=(tmp_path, [proved("b")]), kwargs={"reference": "x"})
            )
            threads[0].start()
            threads[0].join(0.1)
        write(path, value, schema=schema)

    monkeypatch.setattr(proof, "write_typed", slowly)
    write_parity(tmp_path, [proved("a")], reference="x")
    threads[0].join()
    assert [row.run for row in read_parity(tmp_path).rows] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "not an object"),
        ('{"schema": 2, "rows": []}', "reads schema 1"),
        ('{"schema": "1", "rows": []}', "schema"),
        ('{"schema": 1, "time": 3, "rows": []}', "time"),
        ('{"schema": 1}', "rows=null: is missing in"),
        ('{"rows": [{"run": 1}]}', "rows=.*: expected `str`, got `int`"),
    ],
)
def test_a_damaged_file_is_left_as_it_is(tmp_path, text, complaint):
    (tmp_path / "parity.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        write_parity(tmp_path, [proved("a")], reference="x")
    assert (tmp_path / "parity.json").read_text() == text


def rehearsals_of(*candidates, most=16):
    return reduce_all(candidates, steps=3, runs="runs", most=most, saves=True)


def results_of(rehearsals, kind=OutcomeKind.DONE, cause=None):
    """The results, and the recipes that were trained."""
    recipes = []

    def train(recipe):
        recipes.append(recipe)
        return SimpleNamespace(outcome=Outcome(kind=kind, cause=cause), seconds=1.5)

    return list(rehearse(rehearsals, train, lambda ended: "rank-0.log")), recipes


def test_axes_that_do_not_fit_get_a_rehearsal_of_their_own(tmp_path):
    both = rehearsals_of(large(tmp_path, shard=4, tensor=4, pipeline=2, microbatch=1), most=4)
    assert [each.layout for each in both] == ["tp2·pp2 of dp_s4·tp4·pp2", "dp_s2·pp2 of dp_s4·tp4·pp2"]
    assert [each.missing for each in both] == [("dp_s",), ("tp",)]


def test_a_recipe_that_cannot_be_folded_is_a_result(tmp_path):
    (one,) = rehearsals_of(large(tmp_path, shard=8), most=1)
    assert (one.recipe, one.layout) == (None, "dp_s8")
    (result, after), recipes = results_of([one, *rehearsals_of(large(tmp_path, shard=2))])
    assert len(recipes) == 1
    assert after.state == OK
    assert (result.state, result.outcome, result.processes, result.seconds) == (FAILED, "infeasible", 0, 0.0)
    assert result.cause.startswith("parallelism.shard=2: cannot be folded to 1 processes")


def test_recipes_that_train_alike_are_trained_once(tmp_path):
    first, second = large(tmp_path, shard=64, global_batch=64), large(tmp_path, shard=128, global_batch=128)
    results, recipes = results_of(
        rehearsals_of(first, second, Candidate(run="third", recipe=first.recipe)), OutcomeKind.CRASH, "why"
    )
    assert len(recipes) == 1
    assert [(each.run, each.layout, each.same_as, each.seconds) for each in results] == [
        ("dp_s64", "dp_s2 of dp_s64", None, 1.5),
        ("dp_s128", "dp_s2 of dp_s128", "dp_s64", 0.0),
        ("third", "dp_s2 of dp_s64", "dp_s64", 0.0),
    ]
    assert {each.cause for each in results} == {"why"}


# Reduced runs in forked ranks


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            {"kind": OutcomeKind.CRASH, "cause": "ValueError: x", "rank": 11},
            "crash: ValueError: x; log: {}/rank-11.log",
        ),
        ({"kind": OutcomeKind.OOM}, f"oom: {OutcomeKind.OOM.meaning}; log: {{}}/rank-0.log"),
    ],
)
def test_a_failure_is_one_line_with_its_cause_and_the_log_of_its_rank(tmp_path, outcome, said):
    error = RunFailed(Ended(run=RunFolder(tmp_path), attempt=1, outcome=Outcome(**outcome), seconds=1.0))
    assert isinstance(error, TitanlabError)
    assert str(error) == said.format(tmp_path / "logs")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_after_an_error_or_ctrl_c_every_rank_is_killed(tmp_path, monkeypatch, error):
    def interrupted(started, *rest, **named):
        raise error

    killed = []
    monkeypatch.setattr(forked, "fork_children", lambda *given: {})
    monkeypatch.setattr(forked, "wait_for", interrupted)
    monkeypatch.setattr(forked.RankProcesses, "end", lambda self, number, *, seconds: killed.append(number))
    with pytest.raises(error):
        forked.train_in_ranks(tiny.recipe(tmp_path))
    assert killed == [signal.SIGKILL]


def test_ranks_inherit_no_other_rank_and_compute_with_one_thread(monkeypatch):
    """With more threads sums are rounded in another order, and with a rank's variables they would join its ranks."""
    imported, frozen = [], []
    monkeypatch.setattr(forked, "import_trainer", lambda: imported.append(dict(forked.os.environ)))
    monkeypatch.setattr(forked.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(forked.gc, "freeze", lambda: frozen.append(True))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    for name in forked._ENVIRONMENT:
        monkeypatch.setenv(name, "8")
    prepare()
    (environment,) = imported
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & environment.keys()
    # Before torch is imported, which reads them then.
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert frozen == [True]

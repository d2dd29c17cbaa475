"""Rehearsals: what is planned for a recipe, and how each end is told; nothing is trained."""

from types import SimpleNamespace

import pytest

from tests.prove.test_proof import large
from titanlab.errors import ConfigError
from titanlab.prove import FAILED, Candidate, Reduced, Result, reduce_all, rehearse
from titanlab.prove.proof import OK
from titanlab.records import Outcome, OutcomeKind


def planned(*candidates, most=16):
    return reduce_all(candidates, steps=3, runs="runs", most=most, saves=True)


def trained(rehearsals, kind=OutcomeKind.DONE, cause=None):
    """The results, and the recipes that were trained."""
    recipes = []

    def train(recipe):
        recipes.append(recipe)
        return SimpleNamespace(outcome=Outcome(kind=kind, cause=cause), seconds=1.5)

    return list(rehearse(rehearsals, train, lambda ended: "rank-0.log")), recipes


def test_a_recipe_is_rehearsed_in_its_folded_layout(tmp_path):
    (one,) = planned(large(tmp_path, shard=8, tensor=8))
    assert (one.run, one.layout, one.missing, one.error) == ("dp_s8·tp8", "dp_s2·tp2 of dp_s8·tp8", (), None)
    recipe = one.recipe
    assert (recipe.layout.world, recipe.training.steps, recipe.runs) == (4, 3, "runs")


def test_axes_that_do_not_fit_get_a_rehearsal_of_their_own(tmp_path):
    both = planned(large(tmp_path, shard=4, tensor=4, pipeline=2, microbatch=1), most=4)
    assert [each.layout for each in both] == ["tp2·pp2 of dp_s4·tp4·pp2", "dp_s2·pp2 of dp_s4·tp4·pp2"]
    assert [each.missing for each in both] == [("dp_s",), ("tp",)]


def test_a_recipe_that_cannot_be_folded_is_a_result(tmp_path):
    (one,) = planned(large(tmp_path, shard=8), most=1)
    assert (one.recipe, one.layout) == (None, "dp_s8")
    results, recipes = trained([one])
    assert recipes == []
    (result,) = results
    assert (result.state, result.outcome, result.processes, result.seconds) == (FAILED, "infeasible", 0, 0.0)
    assert result.cause.startswith("parallelism.shard=2: cannot be folded to 1 processes")


def test_a_rehearsal_that_is_done_is_ok(tmp_path):
    (result,), (recipe,) = trained(planned(large(tmp_path, shard=8)))
    assert result == Result(
        run="dp_s8", layout="dp_s8", state=OK, outcome="done", processes=recipe.layout.world, seconds=1.5
    )
    assert result.to_mapping() == {
        "run": "dp_s8",
        "layout": "dp_s8",
        "state": "ok",
        "outcome": "done",
        "cause": "",
        "processes": 8,
        "seconds": 1.5,
        "log": None,
        "same_as": None,
        "missing": (),
    }


@pytest.mark.parametrize(
    ("kind", "cause", "told"),
    [(OutcomeKind.CRASH, "it broke", "it broke"), (OutcomeKind.OOM, None, OutcomeKind.OOM.meaning)],
)
def test_a_failure_has_its_cause_and_its_log(tmp_path, kind, cause, told):
    (result,), _ = trained(planned(large(tmp_path, shard=8)), kind, cause)
    assert (result.state, result.outcome, result.cause, result.log) == (FAILED, kind.value, told, "rank-0.log")


def test_recipes_that_train_alike_are_trained_once(tmp_path):
    first, second = large(tmp_path, shard=64, global_batch=64), large(tmp_path, shard=128, global_batch=128)
    results, recipes = trained(
        planned(first, second, Candidate(run="third", recipe=first.recipe)), OutcomeKind.CRASH, "why"
    )
    assert len(recipes) == 1
    assert [(each.run, each.layout, each.same_as, each.seconds) for each in results] == [
        ("dp_s64", "dp_s2 of dp_s64", None, 1.5),
        ("dp_s128", "dp_s2 of dp_s128", "dp_s64", 0.0),
        ("third", "dp_s2 of dp_s64", "dp_s64", 0.0),
    ]
    assert {each.cause for each in results} == {"why"}


def test_failures_do_not_stop_the_others(tmp_path):
    rehearsals = [
        Reduced(run="none", layout="x", error=ConfigError("a", 1, "a rule", "")),
        *planned(large(tmp_path, shard=2)),
    ]
    results, _ = trained(rehearsals)
    assert [each.state for each in results] == [FAILED, OK]
    assert trained([]) == ([], [])

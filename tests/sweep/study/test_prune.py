"""Points that are dropped before they are composed: by conditions, and by the arithmetic of degrees."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import Loader, read_flags
from titanlab.sweep import Composer
from titanlab.sweep.plan import Unfit, prune
from titanlab.sweep.space import read_expression


def pruned(point, *conditions, overrides=()):
    """The stage and the reason that drop a point; None: it stays."""
    loader = Loader(read_flags(overrides), overrides)
    loader.base()
    try:
        prune(Composer(loader, [point]), point, [read_expression(text) for text in conditions])
    except Unfit as unfit:
        return unfit.stage, str(unfit.reason)
    return None


@pytest.mark.parametrize(
    ("point", "condition", "stays"),
    [
        ({"seed": 1}, "seed < 2", True),
        ({"seed": 3}, "seed < 2", False),
        # A file may have numbers as texts, which the composition reads as numbers.
        ({"seed": "3"}, "seed == 3", True),
        ({"optimizer.lr": "1e-3"}, "optimizer.lr == 0.001", True),
        ({"ac": "full"}, "ac == 'full'", True),
        ({"world": 8, "parallelism.tensor": 2}, "parallelism.shard == 4", True),
        ({"world": 8, "parallelism.tensor": 2}, "parallelism.shard * parallelism.tensor == world", True),
        ({"training.steps": 1000}, "optimizer.schedule.warmup_steps <= training.steps", True),
    ],
)
def test_conditions(point, condition, stays):
    overrides = ["parallelism=fsdp"] if "world" in point else []
    expected = None if stays else ("where", condition)
    assert pruned(point, condition, overrides=overrides) == expected


def test_degrees_that_do_not_divide_the_world_are_dropped_without_a_condition():
    stage, reason = pruned({"world": 8, "parallelism.tensor": 3}, overrides=["parallelism=fsdp"])
    assert stage == "layout"
    assert reason.startswith(("world=8: ", "parallelism."))


@pytest.mark.parametrize("point", [{"world": 0}, {"world": "many"}, {"parallelism.tensor": "two"}])
def test_degrees_that_are_no_numbers_are_left_to_the_composition(point):
    assert pruned(point) is None


@pytest.mark.parametrize("group", ["recipe", "sweeps"])
def test_a_group_without_an_option_is_equal_to_no_name(group):
    assert pruned({"seed": 1}, f"{group} == 'x'") == ("where", f"{group} == 'x'")
    assert pruned({"seed": 1}, f"{group} != 'x'") is None


def test_a_key_of_another_option_says_what_to_ask_first():
    with pytest.raises(ConfigError) as caught:
        pruned({"seed": 1}, "ac.budget > 1")
    assert str(caught.value).endswith("its ac is none; ask first: ac != 'none' or …")

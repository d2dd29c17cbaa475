"""Points share the fields of their recipes, and only those that are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import Loader, read_flags
from titanlab.sweep import Composer


def composer(points: list[dict[str, Any]], *overrides: str) -> Composer:
    loader = Loader(read_flags(overrides), overrides)
    loader.base()
    return Composer(loader, points)


def test_what_points_have_in_common_is_one_object():
    points: list[dict[str, Any]] = [
        {"precision": name, "optimizer.lr": lr} for name in ("fp32", "bf16") for lr in (0.1, 0.2)
    ]
    made = composer(points)
    first, second, third, _ = (made.recipe(point) for point in points)
    assert first.model is second.model is third.model
    assert first.precision is second.precision
    assert first.optimizer is third.optimizer
    assert (first.precision.kind, third.precision.kind) == ("fp32", "bf16")
    assert (first.optimizer.lr, second.optimizer.lr) == (0.1, 0.2)


def test_only_the_first_point_of_a_kind_is_composed_whole(monkeypatch):
    points: list[dict[str, Any]] = [{"seed": seed, "training.steps": 10 + seed} for seed in range(20)]
    made = composer(points)
    whole = []
    compose_whole = made._whole_recipe
    monkeypatch.setattr(made, "_whole_recipe", lambda point: whole.append(point) or compose_whole(point))
    recipes = [made.recipe(point) for point in points]
    assert [(recipe.seed, recipe.training.steps) for recipe in recipes] == [(seed, 10 + seed) for seed in range(20)]
    assert whole == []


def test_a_field_that_refers_to_another_follows_it():
    points: list[dict[str, Any]] = [{"model.vocab_size": size, "seed": seed} for size in (512, 1024) for seed in (0, 1)]
    made = composer(points, "data=synthetic")
    sizes = [(made.recipe(point).data.vocab_size, made.recipe(point).model.vocab_size) for point in points]
    assert sizes == [(512, 512), (512, 512), (1024, 1024), (1024, 1024)]
    assert made.recipe(points[0]).data is made.recipe(points[1]).data


def test_a_text_that_refers_to_others_is_each_points_own():
    points: list[dict[str, Any]] = [
        {"name": "${model.kind}-${training.steps}", "training.steps": steps} for steps in (3, 4)
    ]
    made = composer(points)
    assert [made.recipe(point).name for point in points] == ["llama-3", "llama-4"]


@pytest.mark.parametrize("value", [0, "many"])
def test_a_value_that_does_not_fit_is_told_for_every_point_that_has_it(value):
    points: list[dict[str, Any]] = [{"training.steps": value, "seed": seed} for seed in (0, 1)]
    made = composer(points)
    said = []
    for point in points:
        with pytest.raises(ConfigError) as caught:
            made.recipe(point)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith(f"training.steps={value}: ")


def test_shared_fields_are_those_of_a_recipe_that_is_composed_whole():
    point = {"world": "2", "optimizer.schedule": {"floor": 0.25}, "training.max_grad_norm": None, "ac": "full"}
    made = composer([point])
    shared = made.recipe(point)
    whole = made._whole_recipe(point)
    assert dataclasses.asdict(shared) == dataclasses.asdict(whole)
    assert shared == whole

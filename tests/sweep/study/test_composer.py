"""Points put together of memoised parts are what Hydra composes of them, and cost little."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from titanlab.errors import ConfigError
from titanlab.recipe import Loader, Recipe, composition_errors, override_text, read_flags, to_recipe
from titanlab.sweep import Composer

# Values that a space may have, whole and nested, right and wrong.
OPTIONS = {
    "model": ["debug", "llama_5m", "llama3_1_8b"],
    "parallelism": ["single", "fsdp", "fsdp_tp", "hsdp_tp", "fsdp_tp_pp_cp"],
    "schedule": ["1f1b", "zbv", "interleaved_1f1b"],
    "precision": ["fp32", "bf16", "float8_tensorwise", "mxfp8"],
    "ac": ["none", "full", "selective_op", "memory_budget"],
    "compile": ["off", "block", "block_autotune"],
    "optimizer": ["adamw", "muon"],
    "data": ["stdlib", "synthetic", "c4"],
    "recipe": ["quickstart", "llama3_1_8b_8gpus_cpu", "llama3_1_8b_128gpus_float8", "llama3_1_405b_512gpus"],
}
VALUES: dict[str, list[Any]] = {
    "seed": [0, 7],
    "world": [None, 2, 8],
    "name": ["a", "it's [a] $name, no?", "${model.kind}-${training.steps}", "1e3"],
    "training.steps": [10, "30"],
    "training.max_grad_norm": [None, 0.5, 1],
    "parallelism.tensor": [1, 4],
    "parallelism.split": [None, [1, 1], ["layers.3"]],
    "optimizer.lr": [1e-3, "3e-4", 0.1],
    "optimizer.schedule": [{"warmup_steps": 3, "floor": 0.1}],
    "optimizer.schedule.warmup_steps": [1, 5],
    "ac.budget": [0.3],  # of one option only
    "model.dim": [128],
    "data.streams": [8],
    "launch.threads": [2],
}


def loader(*overrides: str) -> Loader:
    made = Loader(read_flags(overrides), overrides)
    made.base()
    return made


def by_hydra(made: Loader, point: Mapping[str, Any]) -> Recipe | str:
    try:
        composed = made.compose(made.overrides_of(point))
        HydraConfig.instance().set_config(composed.whole)
        with composition_errors(made.overrides_of(point)):
            return to_recipe(composed.config, composed.choices, made.config_name)
    except ConfigError as error:
        return str(error)


def put_together(composer: Composer, point: Mapping[str, Any]) -> Recipe | str:
    try:
        return composer.recipe(point)
    except ConfigError as error:
        return str(error)


def drawn(generator: random.Random, count: int) -> list[dict[str, Any]]:
    """Points of a few spaces, each with some random keys; recipes among them."""
    spaces = [
        [*generator.sample(list(OPTIONS), generator.randint(1, 4)), *generator.sample(list(VALUES), 3)]
        for _ in range(count // 8)
    ]
    drawn = (generator.choice(spaces) for _ in range(count))
    return [{key: generator.choice(OPTIONS.get(key) or VALUES[key]) for key in keys} for keys in drawn]


@pytest.mark.parametrize(
    ("seed", "count", "overrides"),
    [
        (6, 8, ()),
        pytest.param(4, 40, (), marks=pytest.mark.full),
        pytest.param(
            *(2, 16, ("+recipe=llama3_1_8b_8gpus_cpu", "training.steps=77", "parallelism.shard=2")),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(3, 16, ("+recipe=quickstart", "optimizer.schedule.floor=0.2", "seed=5")), marks=pytest.mark.full
        ),
    ],
)
def test_random_points_are_what_hydra_composes(seed, count, overrides):
    made = loader(*overrides)
    points = drawn(random.Random(seed), count)
    composer = Composer(made, points)
    outcomes = [(put_together(composer, point), by_hydra(made, point)) for point in points]
    for point, (ours, hydras) in zip(points, outcomes, strict=True):
        assert ours == hydras, point
    # Enough of them are recipes for that to mean something.
    assert sum(isinstance(ours, Recipe) for ours, _ in outcomes) >= count / 4


def test_hydra_is_asked_once_for_an_option_and_not_for_a_point(monkeypatch):
    made = loader("data=synthetic")
    asked = []
    compose = made.compose
    monkeypatch.setattr(made, "compose", lambda overrides: asked.append(overrides) or compose(overrides))
    points: list[Mapping[str, Any]] = [
        {"parallelism": layout, "precision": precision, "ac": ac}
        for layout in OPTIONS["parallelism"]
        for precision in OPTIONS["precision"]
        for ac in OPTIONS["ac"][:3]
    ]
    composer = Composer(made, points)
    recipes = [composer.recipe(point) for point in points]
    assert [recipe.precision.kind for recipe in recipes] == [point["precision"] for point in points]
    # What all share, and each option.
    assert len(asked) == 1 + len(OPTIONS["parallelism"]) + len(OPTIONS["precision"]) + 3


def test_what_an_option_brings_along_is_seen(tmp_path):
    """Options of others that reach beyond their group: by package, by their defaults, by a name that is computed."""
    files = {
        "ac/reaching.yaml": "# @package _global_\ndefaults: [none_schema@ac, _self_]\ntraining:\n  steps: 5\n",
        "ac/bringing.yaml": "defaults:\n  - full_schema\n  - override /precision: bf16\n  - _self_\n",
        "precision/careful.yaml": "defaults: [bf16, _self_]\n",
        "training/long.yaml": "defaults: [schema, _self_]\nsteps: 9000\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    made = Loader(read_flags(["--config-dir", str(tmp_path)]), ())
    made.base()
    assert [made.is_own(*path.removesuffix(".yaml").split("/")) for path in files] == [False, False, True, True]
    points = [
        {"ac": ac, "precision": precision, "training": training}
        for ac in ("reaching", "bringing", "none")
        for precision in ("careful", "fp32")
        for training in ("long", "default")
    ]
    composer = Composer(made, points)
    for point in points:
        assert put_together(composer, point) == by_hydra(made, point), point


def test_a_value_of_one_option_fails_with_the_others_only():
    made = loader("ac.budget=0.25")
    points = [{"ac": option} for option in ("none", "memory_budget", "full")]
    composer = Composer(made, points)
    said = [put_together(composer, point) for point in points]
    assert isinstance(said[1], Recipe)
    assert said[1].ac.budget == 0.25
    assert [str(each).partition(":")[0] for each in (said[0], said[2])] == ["ac.budget=0.25", "ac.budget=0.25"]


def test_what_asks_hydra_itself_is_answered():
    made = loader("name=${hydra:runtime.choices.model}-${hydra:job.num}")
    points = [{"model": "debug"}, {"model": "llama_5m"}]
    composer = Composer(made, points)
    assert [composer.recipe(point).name for point in points] == ["debug-0", "llama_5m-1"]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -0.5, 1e-7, "text", "1f1b", "true", "1e3", "it's, [a] {b}: $c=\\", "", "données/é", [1, None, ["a b"]], {"a": {"b": "c d"}}],
)  # fmt: skip
def test_a_value_survives_hydras_grammar(value):
    (parsed,) = loader().parse([override_text("+key", value)])
    assert parsed.value() == value
    assert not parsed.is_sweep_override()

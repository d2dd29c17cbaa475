"""What a command line and a sweep's file ask for: shared overrides, points, conditions, repeats; one line if wrong."""

from __future__ import annotations

import pytest

from tests.sweep.files import sweep_text, write_sweep
from titanlab.errors import ConfigError
from titanlab.sweep import read_request

SPACE = "hydra/sweeper=space"


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        read_request(arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


def test_swept_values_are_points_and_the_rest_is_shared():
    request = read_request(["training.steps=5", "seed=1,2", "++optimizer.lr=range(0.1,0.3,0.1)", "name=x"])
    assert list(request.loader.overrides) == ["training.steps=5", "name=x"]
    assert request.space == {"product": {"seed": [1, 2], "optimizer.lr": [0.1, 0.2]}}
    assert [point["seed"] for point in request.points] == [1, 1, 2, 2]
    assert request.named


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("range(3)", [0, 1, 2]),
        ("sort(range(0,3),reverse=true)", [2, 1, 0]),
        ("choice(4,2)", [4, 2]),
        ("tag(a,choice(1,2))", [1, 2]),
        ("range(5,0,-2)", [5, 3, 1]),
    ],
)
def test_values_keep_their_order(typed, values):
    assert [point["seed"] for point in read_request([f"seed={typed}"]).points] == values


def test_the_options_of_a_pattern_leave_out_schemas():
    options = [point["ac"] for point in read_request(["ac=glob(*)"]).points]
    assert {"none", "full"} <= set(options)
    assert not [name for name in options if name.endswith("schema")]


def test_a_list_of_options_is_one_value():
    request = read_request(["tracker=[jsonl,tensorboard],jsonl"])
    assert [point["tracker"] for point in request.points] == [["jsonl", "tensorboard"], "jsonl"]


def test_a_condition_may_ask_for_the_sweep_and_the_recipe(tmp_path):
    request = read_request([SPACE, "hydra.sweeper.where=['recipe == 3']", "seed=1,2"])
    assert [expression.text for expression in request.where] == ["recipe == 3"]


def test_a_value_of_a_file_that_the_user_sets_for_all_is_refused_with_what_to_do(tmp_path):
    arguments = write_sweep(
        tmp_path, sweep_text({"product": {"seed": [1, 2]}}, node={"control": {"optimizer.lr": 1.0}})
    )
    assert refusal(*arguments, "optimizer.lr=2").startswith(
        "optimizer.lr=2: is one value for all runs, and the sweep's control has another (1.0); "
    )
    assert refusal(*arguments, "seed=2").endswith("""keep some points: hydra.sweeper.where=["seed == 2"]""")
    assert refusal(*arguments, "seed=2,3").startswith("seed=2,3: is swept by the sweep's file too; ")


def test_hydras_own_parameters_are_swept_too(tmp_path):
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {PARAMS}\n"
    arguments = write_sweep(tmp_path, text.replace("{PARAMS}", "{seed: '3,4'}"))
    assert [point["seed"] for point in read_request(arguments).points] == [3, 4]
    assert refusal(*arguments, "seed=5,6").startswith("seed=5,6: is swept twice; ")
    arguments = write_sweep(tmp_path, text.replace("{PARAMS}", "{seed: '3'}"))
    assert refusal(*arguments) == "hydra.sweeper.params=seed=3: is one value; give it as an override"

"""What a command line and a sweep's file ask for: shared overrides, points, conditions, repeats; one line if wrong."""

from __future__ import annotations

import omegaconf
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


def test_without_a_space_there_is_one_point():
    request = read_request(["training.steps=5"])
    assert (list(request.points), request.space, request.repeats, request.control) == ([{}], None, 1, None)
    assert (list(request.where), request.option, request.named) == ([], None, False)
    assert request.definition == {"overrides": ["training.steps=5"], "space": None, "where": [], "repeats": 1}


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


def test_a_file_and_the_command_line_are_multiplied(tmp_path):
    node = {"where": "seed < 9", "repeats": 2, "control": {"optimizer.lr": 1.0}}
    arguments = write_sweep(tmp_path, sweep_text({"product": {"seed": [1, 2]}}, node=node))
    request = read_request([*arguments, "training.seq_len=16,32"])
    assert [(point["seed"], point["training.seq_len"]) for point in request.points] == [
        (1, 16),
        (1, 32),
        (2, 16),
        (2, 32),
    ]
    assert (request.repeats, request.control, request.option) == (2, {"optimizer.lr": 1.0}, "mine")
    assert request.definition["where"] == ["seed < 9"]
    assert request.definition["control"] == {"optimizer.lr": 1.0}


def test_a_condition_may_ask_for_the_sweep_and_the_recipe(tmp_path):
    request = read_request([SPACE, "hydra.sweeper.where=['recipe == 3']", "seed=1,2"])
    assert [expression.text for expression in request.where] == ["recipe == 3"]


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["seed=1,2", "++seed=3,4"], "seed=3,4: is swept twice; "),
        (["seed=1,2", "seed=7"], "seed=7: is one value for all points"),
        (["seed=1,1"], "space.product.seed=1: is there twice; "),
        (["seed=1,1.0"], "seed=1.0: must be a whole number; "),
        (["seed='\N{GRINNING FACE}',1"], "seed=\N{GRINNING FACE}: must be a whole number; "),
        (["seed=range(0,10,nan)"], "seed=range(0,10,nan): has no end of values, or none at all; "),
        (["seed=glob(*)"], "seed=glob(*): fits no value; "),
        (["seed=1," + "9" * 5000], "arguments="),
        (["=1,2"], "space.product=: is no key of a recipe; "),
        (["training.steps.x=1,2"], "training.steps.x=1,2: is no key of this recipe; did you mean training.steps?"),
        (["sweeps=a,b"], "sweeps=a,b: is one for the whole sweep; "),
        (["optimizer.schedule=3,4"], "optimizer.schedule=3: has keys of its own; "),
        ([SPACE, "seed=1,2", "hydra.sweeper.repeats=true"], "repeats=true: must be a whole number, at least 1; "),
        ([SPACE, "seed=1,2", "hydra.sweeper.repeats=1001"], "repeats=1001: is more than 1000; "),
        ([SPACE, "seed=1,2", "hydra.sweeper.where=[null]"], "where=null: is no condition; "),
        (["seed=1,2", "hydra.sweeper=null"], "hydra.sweeper=null: takes away what titanlab reads a sweep with; "),
        (["seed=1,2", "~hydra.launcher._target_"], "hydra.launcher._target_=: would run the points by itself"),
        pytest.param(
            ["+hydra.sweeper.params={seed:'1,2'}"],
            "hydra.sweeper.params={seed:'1,2'}: is null, which takes no keys; ",
            marks=pytest.mark.skipif(not omegaconf.__version__.startswith("2.3."), reason="later ones take them"),
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_wrong_request_is_one_line(arguments, begins):
    assert refusal(*arguments).startswith(begins)


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

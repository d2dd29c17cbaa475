"""The columns of one run, from what its files hold."""

import pytest

from tests import tiny
from titanlab.costs import meter
from titanlab.recipe import to_mapping
from titanlab.sweep import figure_columns, recipe_columns
from titanlab.sweep.columns import machine_columns, provenance_columns


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"shard": 2, "microbatch": 3},
        {"pipeline": 2},
        {"pipeline": 2, "replicate": 2, "context": 2, "microbatch": 2},
        {"blocks": True, "loss": True, "backend": "eager"},
    ],
)
def test_sizes_are_those_of_the_recipe(tmp_path, given):
    recipe = tiny.recipe(tmp_path, **given)
    row = recipe_columns(to_mapping(recipe))
    assert row["microbatch"] == recipe.microbatch
    assert row["tokens_per_step"] == recipe.tokens_per_step
    assert row["layout.label"] == recipe.layout.label
    assert row["compile"] == ("blocks+loss" if given.get("blocks") else "off")
    assert row["schedule"] == ("1f1b" if "pipeline" in given else None)


@pytest.mark.parametrize("key", ["training", "parallelism", "model", "cluster", "repeat"])
def test_what_is_no_recipe_is_an_error(tmp_path, key):
    config = to_mapping(tiny.recipe(tmp_path))
    with pytest.raises((LookupError, TypeError)):
        recipe_columns({**config, key: None} if key != "repeat" else {k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, (None, None, None)),
        ({meter.TOKENS_PER_SECOND: 10.0, meter.STEP_SECONDS: 2.0}, (10.0, 40.0, 2.0)),
        # The row of a run under way has the last step's time and the median; the median is the figure.
        ({meter.STEP_SECONDS: 2.0, meter.STEP_SECONDS_MEDIAN: 3.0}, (None, None, 3.0)),
    ],
)
def test_speeds_are_of_one_device_and_of_all(metrics, expected):
    columns = figure_columns(metrics, world=4)
    assert (columns["tokens_per_second"], columns["tokens_per_second_all"], columns["step_seconds"]) == expected


def test_each_figure_is_in_its_own_column():
    """Figures of one kind and size, which nobody could tell apart by their values."""
    metrics = {
        meter.STEP_SECONDS: 2.0,
        meter.STEP_SECONDS_LOW: 1.0,
        meter.STEP_SECONDS_HIGH: 3.0,
        "first_loss": 9.0,
        meter.LOSS: 4.0,
        meter.VALIDATION_LOSS: 5.0,
        meter.TRAIN_SECONDS: 60.0,
        meter.PAUSED_SECONDS: 6.0,
    }
    columns = figure_columns(metrics, world=1)
    times = [columns[name] for name in ("step_seconds_q1", "step_seconds", "step_seconds_q3")]
    assert (times, columns["train_seconds"], columns["paused_seconds"]) == ([1.0, 2.0, 3.0], 60.0, 6.0)
    assert (columns["first_loss"], columns["loss"], columns["validation_loss"]) == (9.0, 4.0, 5.0)


RESIDENT = "memory/max_resident(GiB)"


@pytest.mark.parametrize(
    ("metrics", "world", "expected"),
    [
        ({}, 1, (None, None)),
        ({RESIDENT: 0.5}, 1, (0.5, 0)),
        # Nobody has compared the ranks.
        ({RESIDENT: 0.5}, 2, (0.5, None)),
        ({meter.MEMORY_RESERVED: 2.0, RESIDENT: 9.0}, 1, (2.0, 0)),
        ({meter.MEMORY_RESERVED: 2.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (3.0, 1)),
        ({meter.MEMORY_RESERVED: 4.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (4.0, None)),
        ({meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (3.0, 1)),
    ],
)
def test_memory_is_the_largest_peak_that_is_known(metrics, world, expected):
    columns = figure_columns(metrics, world=world)
    assert (columns["memory_gib"], columns["memory_rank"]) == expected


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, None),
        ({"peak_tflops": 989.0}, None),
        ({"flops_convention": "6N"}, None),
        (
            {"peak_tflops": 989.4, "flops_convention": "6N", "peak_source": "data sheet"},
            "6N FLOPs a token, over 989.4 TFLOP/s (data sheet)",
        ),
        ({"peak_tflops": 1.0, "flops_convention": "6N"}, "6N FLOPs a token, over 1 TFLOP/s (unknown source)"),
    ],
)
def test_an_mfu_says_what_it_is_a_share_of(metrics, text):
    assert figure_columns(metrics, world=1)["mfu_convention"] == text


@pytest.mark.parametrize(
    ("env", "job", "expected"),
    [
        (None, {}, (None, None, None, None)),
        ({}, {}, (None, None, None, None)),
        ({"code": None, "host": None, "packages": None}, {"nodes": None}, (None, None, None, None)),
        (
            {
                "code": {"git": {"sha": "abc", "dirty": True}},
                "packages": {"torch": "2.11.0"},
                "host": {"name": "a.example.org"},
            },
            {},
            ("abc", True, "2.11.0", "a.example.org"),
        ),
        # The scheduler knows of all hosts, also if no process lived to begin.
        ({"host": {"name": "a"}}, {"nodes": ["a", "b"]}, (None, None, None, "a,b")),
        (None, {"nodes": ["a"]}, (None, None, None, "a")),
    ],
)
def test_provenance_may_be_known_in_part(env, job, expected):
    columns = provenance_columns(env, job)
    assert tuple(columns[name] for name in ("git_commit", "git_dirty", "torch", "host_names")) == expected


def config_of(world, accelerator="cpu"):
    return {"world": world, "cluster": {"accelerator": accelerator}}


@pytest.mark.parametrize(
    ("usable", "nodes", "config", "expected"),
    [
        (4, [], config_of(4), (1, 4, False)),
        (4, [], config_of(5), (1, 4, True)),
        (4, ["a", "b"], config_of(8), (2, 8, False)),
        (4, ["a.example.org", "b.example.org"], config_of(8), (2, 8, False)),
        (4, ["a", "a"], config_of(8), (1, 4, True)),
        (4, ["n1", "n2"], config_of(8), (1, 4, True)),
        (None, [], config_of(8), (1, None, None)),
        (1, [], config_of(8, "cuda"), (1, 1, False)),
    ],
)
def test_cores_are_those_of_all_hosts(usable, nodes, config, expected):
    env = {"host": {"name": "a.cluster", "usable_cores": usable}}
    columns = machine_columns(env, {"nodes": nodes}, config)
    assert (columns["hosts"], columns["cores"], columns["oversubscribed"]) == expected


def test_of_an_attempt_that_never_began_no_machine_is_known():
    assert machine_columns(None, {}, config_of(1)) == {}
    assert machine_columns({"code": {}}, {"nodes": ["a"]}, config_of(1)) == {}


@pytest.mark.parametrize("host", [{}, {"name": 5}, {"name": ["a"]}, {"name": "a", "usable_cores": "many"}])
def test_of_a_damaged_record_of_the_host_no_machine_is_known(host):
    assert machine_columns({"host": host}, {"nodes": ["a"]}, config_of(1)) == {}

"""Columns of a sweep's table: those of the page, the values that they take, and the point's."""

from pathlib import Path

import pytest

from tests import tiny
from titanlab.costs import meter
from titanlab.recipe import to_mapping
from titanlab.sweep import as_text, figure_columns, fitting_value, recipe_columns
from titanlab.sweep.rows import COLUMNS, origin_columns

PAGE = (Path(__file__).parents[3] / "docs" / "comparing.md").read_text()


def test_the_page_has_every_column_and_no_other():
    section = PAGE.split("\n## Columns\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    told = {cells[0]: cells[1] for cells in lines if len(cells) == 3 and cells[0].startswith("`")}
    expected = {f"`{name}`": kind for name, kind in COLUMNS.items()}
    assert told == {**expected, "`point.KEY`": "text"}
    assert all(cells[2] for cells in lines if len(cells) == 3 and cells[0].startswith("`"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cause", "boom", "boom"),
        ("cause", 3, None),
        # The columns of a point are text.
        ("point.seed", "3", "3"),
        ("stale", False, False),
        ("stale", 1, None),
        ("step", 0, 0),
        ("step", True, None),
        ("step", 3.0, None),
        ("step", 2**63 - 1, 2**63 - 1),
        ("step", 2**63, None),
        ("loss", 4.25, 4.25),
        ("loss", 4, 4.0),
        ("loss", "4", None),
    ],
)
def test_a_value_of_another_kind_than_its_column_is_none(name, value, expected):
    found = fitting_value(name, value)
    assert (found, type(found)) == (expected, type(expected))


def test_a_whole_number_in_a_column_of_numbers_is_one_that_a_float_holds():
    """Parquet takes no whole number above 2**53 as a number: `titanlab collect` ended with a traceback."""
    found = fitting_value("flops_per_token", 2**60 + 1)
    assert (found, type(found)) == (float(2**60), float)
    assert fitting_value("flops_per_token", 10**400) is None


def test_text_that_no_file_holds_is_taken_as_far_as_it_goes():
    """Half a pair of UTF-16, as a damaged JSON file has it: `titanlab collect` ended with a traceback."""
    assert fitting_value("cause", "a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.001, "0.001"),
        ("fsdp_tp", "fsdp_tp"),
        ([0.9, None, [True]], "[0.9, null, [true]]"),
        ((1, 2), "[1, 2]"),
    ],
)
def test_a_value_of_a_point_is_shown_as_one_types_it(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize(
    "given", [{}, {"shard": 2, "microbatch": 3}, {"pipeline": 2, "replicate": 2}, {"blocks": True, "loss": True}]
)
def test_sizes_are_those_of_the_recipe(tmp_path, given):
    recipe = tiny.recipe(tmp_path, **given)
    row = recipe_columns(to_mapping(recipe))
    assert (row["microbatch"], row["tokens_per_step"]) == (recipe.microbatch, recipe.tokens_per_step)
    assert row["layout.label"] == recipe.layout.label
    assert row["compile"] == ("blocks+loss" if given.get("blocks") else "off")
    assert row["schedule"] == ("1f1b" if "pipeline" in given else None)


def test_each_figure_is_in_its_own_column():
    """Figures of one kind and size, which nobody could tell apart by their values."""
    metrics = {
        meter.TOKENS_PER_SECOND: 10.0,
        meter.STEP_SECONDS: 2.0,
        meter.STEP_SECONDS_LOW: 1.0,
        meter.STEP_SECONDS_HIGH: 3.0,
        "first_loss": 9.0,
        meter.LOSS: 4.0,
        meter.VALIDATION_LOSS: 5.0,
        meter.TRAIN_SECONDS: 60.0,
        meter.PAUSED_SECONDS: 6.0,
        meter.SKIPPED_STEPS: 3,
    }
    columns = figure_columns(metrics, world=4)
    assert (columns["tokens_per_second"], columns["tokens_per_second_all"]) == (10.0, 40.0)
    times = [columns[name] for name in ("step_seconds_q1", "step_seconds", "step_seconds_q3")]
    assert (times, columns["train_seconds"], columns["paused_seconds"]) == ([1.0, 2.0, 3.0], 60.0, 6.0)
    assert (columns["first_loss"], columns["loss"], columns["validation_loss"]) == (9.0, 4.0, 5.0)
    assert columns["skipped_steps"] == 3
    # A run under way has the last step's time and the median; the median is the figure.
    assert figure_columns({**metrics, meter.STEP_SECONDS_MEDIAN: 2.5}, world=1)["step_seconds"] == 2.5
    assert figure_columns({}, world=4)["tokens_per_second_all"] is None


RESIDENT = "memory/max_resident(GiB)"


@pytest.mark.parametrize(
    ("metrics", "world", "expected"),
    [
        ({RESIDENT: 0.5}, 1, (0.5, 0)),
        # Nobody has compared the ranks.
        ({RESIDENT: 0.5}, 2, (0.5, None)),
        ({meter.MEMORY_RESERVED: 2.0, RESIDENT: 9.0}, 1, (2.0, 0)),
        ({meter.MEMORY_RESERVED: 2.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (3.0, 1)),
        ({meter.MEMORY_RESERVED: 4.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (4.0, None)),
    ],
)
def test_memory_is_the_largest_peak_that_is_known(metrics, world, expected):
    columns = figure_columns(metrics, world=world)
    assert (columns["memory_gib"], columns["memory_rank"]) == expected


def test_an_mfu_says_what_it_is_a_share_of():
    known = {"peak_tflops": 989.4, "flops_convention": "6N", "peak_source": "data sheet"}
    assert figure_columns(known, world=1)["mfu_convention"] == "6N FLOPs a token, over 989.4 TFLOP/s (data sheet)"
    del known["peak_source"]
    assert figure_columns(known, world=1)["mfu_convention"].endswith("(unknown source)")
    assert figure_columns({"peak_tflops": 989.0}, world=1)["mfu_convention"] is None


@pytest.mark.parametrize(
    ("usable", "nodes", "world", "accelerator", "expected"),
    [
        (4, [], 4, "cpu", (1, 4, False)),
        (4, [], 5, "cpu", (1, 4, True)),
        (4, ["a.example.org", "b.example.org"], 8, "cpu", (2, 8, False)),
        # Names that no machine has: all of them are this one.
        (4, ["n1", "n2"], 8, "cpu", (1, 4, True)),
        (None, [], 8, "cpu", (1, None, None)),
        (1, [], 8, "cuda", (1, 1, False)),
        ("many", [], 8, "cpu", (None, None, None)),
    ],
)
def test_cores_are_those_of_all_hosts(usable, nodes, world, accelerator, expected):
    env = {"host": {"name": "a.cluster", "usable_cores": usable}, "code": {"git": {"sha": "abc", "dirty": True}}}
    columns = origin_columns(env, {"nodes": nodes}, {"world": world, "cluster": {"accelerator": accelerator}})
    assert tuple(columns.get(name) for name in ("hosts", "cores", "oversubscribed")) == expected
    assert (columns["git_commit"], columns["git_dirty"]) == ("abc", True)
    assert columns["host_names"] == (",".join(nodes) or "a.cluster")

"""The fields that all kinds of checkpoints share: which values go together, and what is told of the others."""

from __future__ import annotations

import pytest

from titanlab.checkpoint import OnlyModel
from titanlab.checkpoint.schema import Sync
from titanlab.errors import ConfigError


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"every": 300, "keep_every": 900},
        {"every": 300, "keep_every": 300},
        {"minutes": 0.5, "keep_every": 7},
        {"keep": 0, "at_end": False},
        {"last": "model"},
        {"last": "model", "last_dtype": "bfloat16"},
        {"load_from": "runs/a", "folder": None},
    ],
)
def test_values_that_go_together_are_taken(given):
    made = Sync(**given)
    assert {name: getattr(made, name) for name in given} == given


DTYPES = "float32, bfloat16, float16"
LAST = "try checkpoint.last=model, or null"
FEW = "no multiple of checkpoint.every=300, so few of these steps would be saved"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": -1}, "checkpoint.every=-1: must not be negative; try 0"),
        ({"minutes": -0.5}, "checkpoint.minutes=-0.5: must not be negative; try 0"),
        ({"keep": -2}, "checkpoint.keep=-2: must not be negative; try 0"),
        ({"keep_every": -3}, "checkpoint.keep_every=-3: must not be negative; try 0"),
        ({"last": "weights"}, "checkpoint.last=weights: is not known; try full or model"),
        (
            {"last": "model", "last_dtype": "int8"},
            f"checkpoint.last_dtype=int8: is not known; try one of {DTYPES}, or null",
        ),
        (
            {"last_dtype": "bfloat16"},
            f"checkpoint.last_dtype=bfloat16: a full checkpoint has the dtypes of the training; {LAST}",
        ),
        (
            {"every": 300, "keep_every": 1000},
            f"checkpoint.keep_every=1000: {FEW}; try 900",
        ),
        (
            {"every": 300, "keep_every": 10},
            f"checkpoint.keep_every=10: {FEW}; try 300",
        ),
    ],
)
def test_values_that_do_not_are_told(given, said):
    with pytest.raises(ConfigError) as caught:
        Sync(**given)
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["folder", "load_from"])
def test_an_address_is_checked(name):
    assert getattr(Sync(**{name: "s3://bucket/folder"}), name) == "s3://bucket/folder"
    with pytest.raises(ConfigError) as caught:
        Sync(**{name: "s3://key:hunter2@bucket/folder"})
    assert caught.value.key == f"checkpoint.{name}"
    assert "hunter2" not in str(caught.value)


def test_a_folder_of_this_host_needs_no_package():
    Sync().check_installed()
    with pytest.raises(ConfigError, match=r"^checkpoint\.folder="):
        Sync(folder="nosuchstore://bucket/x").check_installed()


def test_a_kind_is_the_same_on_a_cpu():
    made = Sync(every=3)
    assert made.reduced(note=pytest.fail) is made
    assert (OnlyModel().dtype, OnlyModel(dtype="bfloat16").dtype) == (None, "bfloat16")

"""An action of all ranks: which error each of them raises, and in which form it travels."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from titanlab.checkpoint import on_all_ranks
from titanlab.checkpoint.store import attempted, raise_first
from titanlab.distributed import World
from titanlab.errors import ConfigError

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


class TwoArguments(Exception):
    """Pickled, it cannot be made again."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}\nwith more lines")


def fails(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize("value", [None, 0, False, "text"])
def test_a_value_comes_back_without_an_error(value):
    assert attempted(lambda: value) == (value, None)
    assert on_all_ranks(ALONE, lambda: value) == value


def test_an_error_that_can_travel_is_the_same_object():
    error = FileNotFoundError(2, "No such file", "x")
    assert attempted(fails(error)) == (None, error)
    with pytest.raises(FileNotFoundError) as caught:
        on_all_ranks(ALONE, fails(error))
    assert caught.value is error


@pytest.mark.parametrize("error", [TwoArguments("one", "two"), type("Local", (Exception,), {})("one and two")])
def test_an_error_that_cannot_be_pickled_travels_as_its_first_line(error):
    value, portable = attempted(fails(error))
    assert (value, type(portable)) == (None, RuntimeError)
    assert str(portable) == f"{type(error).__name__}: one and two"
    assert portable.__cause__ is error
    assert str(pickle.loads(pickle.dumps(portable))) == str(portable)


def test_an_end_of_the_process_is_no_failure():
    with pytest.raises(KeyboardInterrupt):
        attempted(fails(KeyboardInterrupt()))


@pytest.mark.parametrize("failures", [[], [None], [None, None]])
def test_without_failures_nothing_is_raised(failures):
    assert raise_first(failures) is None


def test_the_error_that_says_most_is_raised():
    config = ConfigError("a", 1, "is wrong", "try 2")
    own, other = OSError("own"), OSError("other")
    for failures, mine, expected in [
        ([other, own], None, other),
        ([other, own], own, own),
        ([None, other], None, other),
        ([other, config, own], own, config),
        ([config], config, config),
    ]:
        with pytest.raises((OSError, ConfigError)) as caught:
            raise_first(failures, own=mine)
        assert caught.value is expected


def of_rank(failing):
    """As one of two ranks: an action that fails on some of them. Returns its value, or what was raised."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, world=2, local_rank=rank, device=torch.device("cpu"))

    def action():
        if rank in failing:
            raise failing[rank]
        return rank

    try:
        return on_all_ranks(world, action)
    except (OSError, ConfigError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({}, [0, 1]),
        ({1: OSError("of rank 1")}, ["of rank 1"] * 2),
        ({0: OSError("of rank 0"), 1: OSError("of rank 1")}, ["of rank 0", "of rank 1"]),
        ({0: OSError("of rank 0"), 1: ConfigError("a", 1, "is wrong", "try 2")}, ["a=1: is wrong; try 2"] * 2),
    ],
)
def test_all_ranks_fail_if_one_fails(pool, failing, expected):
    assert pool.run(2, of_rank, failing) == expected

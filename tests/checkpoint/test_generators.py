"""States of the random generators: they come back exactly, and what is no state is damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from titanlab.checkpoint import DamagedCheckpoint, generator_states, set_generators
from titanlab.checkpoint.store import restore_generators
from titanlab.distributed import World

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
HERE = Path("here")


@pytest.fixture(autouse=True)
def kept():
    """The generators of the tests after these stand where they stood."""
    states = generator_states(ALONE)
    yield
    set_generators(states, ALONE)


def drawn():
    return random.random(), np.random.random_sample(), torch.rand(3).tolist()  # noqa: NPY002


def packed(state):
    return json.dumps(state).encode()


def test_each_generator_goes_on_where_its_state_was_taken():
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002
    states = generator_states(ALONE)
    assert list(states) == ["cpu", "python", "numpy"]
    first = (drawn(), random.gauss(0, 1), np.random.standard_normal())  # noqa: NPY002
    set_generators(states, ALONE)
    assert (drawn(), random.gauss(0, 1), np.random.standard_normal()) == first  # noqa: NPY002


def test_generators_without_a_state_stay():
    states = generator_states(ALONE)
    set_generators({}, ALONE)
    set_generators({"python": states["python"]}, ALONE)
    now = generator_states(ALONE)
    assert now == states


BAD = {
    "no bytes of a generator": {"cpu": bytes(7)},
    "no bytes": {"cpu": b""},
    "no JSON": {"python": b"\x01\x02\x03"},
    "a number": {"python": packed(5)},
    "too few values": {"python": packed([3, []])},
    "too few words": {"python": packed([3, [1, 2], None])},
    "words of text": {"python": packed([3, ["a"] * 625, None])},
    "another version": {"python": packed([9, [0] * 625, None])},
    "words that are too large": {"numpy": packed(["MT19937", [2**40] * 624, 0, 0, 0.0])},
    "a word too few": {"numpy": packed(["MT19937", [0] * 623, 0, 0, 0.0])},
    "a position behind the words": {"numpy": packed(["MT19937", [0] * 624, 625, 0, 0.0])},
    "a negative position": {"numpy": packed(["MT19937", [0] * 624, -1, 0, 0.0])},
    "a position of text": {"numpy": packed(["MT19937", [0] * 624, "a", 0, 0.0])},
    "another generator": {"numpy": packed(["PCG64", [0] * 624, 0, 0, 0.0])},
    "a mapping": {"numpy": packed({"a": 1})},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_state_is_damage(name):
    with pytest.raises(DamagedCheckpoint, match=r"^run=here: holds no state of a generator \(\w+Error\)"):
        restore_generators(BAD[name], ALONE, HERE, "run")

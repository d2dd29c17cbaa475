"""Layouts: degrees, the one that is the rest, and refusals."""

import pytest

from titanlab.costs import Layout, resolve_layout
from titanlab.errors import ConfigError


@pytest.mark.parametrize(
    ("degrees", "world", "expected"),
    [
        ({"replicate": 1, "shard": 1}, None, Layout()),
        ({"replicate": 1, "shard": -1}, 4, Layout(shard=4)),
        ({"replicate": -1, "shard": 1}, 3, Layout(replicate=3)),
        ({"replicate": 2, "shard": -1}, 8, Layout(replicate=2, shard=4)),
        ({"replicate": 2, "shard": 2}, 4, Layout(replicate=2, shard=2)),
        ({"replicate": 2, "shard": 2}, None, Layout(replicate=2, shard=2)),
    ],
)
def test_degrees_resolve(degrees, world, expected):
    assert resolve_layout(degrees, world) == expected


@pytest.mark.parametrize(
    ("degrees", "world", "key"),
    [
        ({"replicate": 1, "shard": 0}, None, "parallelism.shard"),
        ({"replicate": -2, "shard": 1}, 4, "parallelism.replicate"),
        ({"replicate": -1, "shard": -1}, 4, "parallelism.replicate"),
        ({"replicate": 1, "shard": -1}, None, "parallelism.shard"),
        ({"replicate": 3, "shard": -1}, 4, "world"),
        ({"replicate": 2, "shard": 2}, 8, "world"),
    ],
)
def test_impossible_degrees_are_refused(degrees, world, key):
    with pytest.raises(ConfigError) as refused:
        resolve_layout(degrees, world)
    assert refused.value.key == key
    assert refused.value.cure


def test_the_cure_for_a_world_that_does_not_match_is_accepted():
    with pytest.raises(ConfigError) as refused:
        resolve_layout({"replicate": 3, "shard": -1}, 7)
    world = int(refused.value.cure.rpartition("=")[2])
    assert resolve_layout({"replicate": 3, "shard": -1}, world).world == world


def test_labels_name_the_axes_in_use():
    assert Layout().label == "single"
    assert Layout(replicate=2, shard=4).label == "dp_r2·dp_s4"
    assert Layout(replicate=2, shard=4).data == 8

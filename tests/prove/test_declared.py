"""Which numbers a rank has on the axes, and what it declares."""

from __future__ import annotations

from itertools import product

import pytest

from tests import tiny
from titanlab.costs import Coordinate, Layout
from titanlab.prove.declared import declared, place_of
from titanlab.techniques.precision.cast_schema import Bf16


def test_every_rank_has_a_place_of_its_own():
    layout = Layout(pipeline=2, replicate=2, shard=3, context=2, tensor=2)
    places = [place_of(layout, rank) for rank in range(layout.world)]
    assert places[0] == Coordinate()
    assert places[1] == Coordinate(tensor=1)
    assert places[2] == Coordinate(context=1, fsdp=1)
    assert places[4] == Coordinate(fsdp=2)
    assert places[12] == Coordinate()  # the next replica
    assert places[24] == Coordinate(pipeline=1)
    axes = {(place.pipeline, place.context, place.tensor, place.fsdp) for place in places}
    assert axes == {(p, f % 2, t, f) for p, f, t in product(range(2), range(6), range(2))}


@pytest.mark.parametrize("layout", [{"shard": 4}, {"shard": 2, "tensor": 2}, {"pipeline": 2, "shard": 2}])
def test_all_ranks_together_store_the_model_once(tmp_path, layout):
    made = tiny.recipe(tmp_path, **layout)
    account = made.model.account()
    stored = sum(declared(made, rank).parameter_bytes for rank in range(made.world))
    # Norms are whole on the ranks of tensor parallelism.
    norms = 64 * (2 * account.layers + 1) * 4 * (made.layout.tensor - 1)
    assert stored == 4 * account.parameter_count + norms


def test_a_part_in_32_bits_keeps_twice_as_much(tmp_path):
    made = tiny.recipe(tmp_path, shard=2, precision=Bf16(fp32_parts=["layers.1"]))
    saved = declared(made, 0).saved
    assert saved[0] < saved[1] < 2 * saved[0]

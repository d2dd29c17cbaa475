"""Configs of policies for whole blocks: which blocks are recomputed, and what a smaller model makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer


def blocks(config, layers=6):
    return [number for number in range(layers) if config.recomputes(number)]


def test_none_and_full_are_none_and_all():
    assert blocks(NoCheckpointing()) == []
    assert blocks(FullCheckpointing()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("every", "chosen"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (3, [0, 3]), (6, [0]), (7, [0])]
)
def test_every_nth_block_is_recomputed_or_all_others(every, chosen):
    assert blocks(SelectiveLayer(every=every)) == chosen
    others = [number for number in range(6) if number not in chosen]
    assert blocks(SelectiveLayer(every=every, keep=True)) == others


@pytest.mark.parametrize("every", [0, -1, -(10**9)])
@pytest.mark.parametrize(("keep", "instead"), [(False, "none"), (True, "full")])
def test_a_number_below_1_is_one_line(every, keep, instead):
    with pytest.raises(ConfigError) as caught:
        SelectiveLayer(every=every, keep=keep)
    rule = "must be at least 1; try 2 for every second block"
    assert str(caught.value) == f"ac.every={every}: {rule}, or ac={instead} for none"


@pytest.mark.parametrize(("layers", "advice"), [(1, 1), (2, 1), (5, 2)])
def test_a_model_with_fewer_blocks_is_one_line_whose_advice_works(layers, advice):
    given = SimpleNamespace(model=SimpleNamespace(layers=layers))
    SelectiveLayer(every=layers).check(given)
    with pytest.raises(ConfigError) as caught:
        SelectiveLayer(every=layers + 1).check(given)
    line = f"ac.every={layers + 1}: is more than the model's {layers} blocks; try {advice}, or ac=none"
    assert str(caught.value) == line
    SelectiveLayer(every=advice).check(given)


@pytest.mark.parametrize(("every", "reduced"), [(1, 1), (2, 2), (3, 2), (100, 2)])
def test_a_smaller_model_has_blocks_of_both_sorts(every, reduced):
    notes = []
    made = SelectiveLayer(every=every, keep=True).reduced(note=notes.append)
    assert made == SelectiveLayer(every=reduced, keep=True)
    assert notes == ([] if every == reduced else [f"ac.every={every} is more than the blocks allow: 2"])

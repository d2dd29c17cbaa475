"""Names of the runs of a sweep's points."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.records import check_name
from titanlab.sweep.space import LENGTH, SweepPoint

values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())


@given(st.dictionaries(st.text(min_size=1), values), st.integers(0, 2000))
def test_every_label_can_be_a_folder_of_bounded_length(values: dict[str, Any], repeat: int) -> None:
    label = SweepPoint(values=values, repeat=repeat).label
    check_name("name", label)
    assert len(label) <= LENGTH


@given(st.dictionaries(st.text(min_size=1), values), st.integers(0, 2000), st.integers(0, 2000))
def test_repeats_have_labels_of_their_own(values: dict[str, Any], one: int, other: int) -> None:
    """Also those whose values are longer than the label: the number is not cut off."""
    labels = [SweepPoint(values=values, repeat=repeat).label for repeat in (one, other)]
    assert (labels[0] == labels[1]) == (one == other)


@pytest.mark.parametrize(
    ("values", "repeat", "label"),
    [
        ({}, 0, "base"),
        ({}, 2, "base-r2"),
        ({"name": "x", "repeat": 3}, 0, "base"),
        ({"parallelism": "mine/fsdp"}, 0, "fsdp"),
        ({"launch": "local", "precision": "bf16"}, 0, "launch_local-bf16"),
        ({"model.tied_embeddings": True, "model.fused": False}, 0, "tied_embeddings-no_fused"),
        ({"training.seq_len": 4096, "optimizer.lr": 3e-4}, 0, "seq_len4096-lr0.0003"),
        ({"data.shares": [1, 2], "init_from": None}, 0, "shares_1x2-init_from_none"),
        ({"data.files": "my texts/*.txt"}, 0, "files_my-texts-.txt"),
        ({"k": "é"}, 0, "base"),
        ({"a.b": "x" * 80}, 12, "b_" + "x" * 54 + "-r12"),
        ({"a.b": "x" * 50 + "-" * 9 + "y"}, 0, "b_" + "x" * 50),
    ],
)  # fmt: skip
def test_a_label_says_the_values_in_short(values: dict[str, Any], repeat: int, label: str) -> None:
    assert SweepPoint(values=values, repeat=repeat).label == label

"""Identity: what changes a run's hash, and what must not."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests import tiny
from titanlab.data import Synthetic
from titanlab.data.schema import Stdlib, TokenFolder
from titanlab.records import canonical, canonical_json, identify


@dataclass(kw_only=True)
class Adam:
    kind: str = "adam"
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    options: dict[str, float] = field(default_factory=dict)
    clip: float | None = None


@dataclass(kw_only=True)
class Sgd:
    kind: str = "sgd"
    lr: float = 3e-4


@dataclass(kw_only=True)
class Folder:
    path: str = "runs"


@dataclass(kw_only=True)
class Root:
    name: str = field(default="run", metadata={"identity": False})
    steps: int = 10
    optimizer: Any = field(default_factory=Adam)
    extra: Any = None
    tracker: Any = field(default=None, metadata={"identity": False})
    folder: Folder = field(default_factory=Folder, metadata={"identity": False})


def hashed(recipe: Any, **given: Any) -> str:
    return identify(recipe, **{"data": "d", "hardware": "cpu", **given}).sha256


def test_the_hash_of_a_recipe_is_pinned():
    # If this changes, every run that was ever made gets another folder.
    text = (
        '{"data":"d","hardware":"cpu","recipe":{"extra":null,"optimizer":{"betas":[0.9,0.95],"clip":null,"kind":"adam",'
        '"lr":0.0003,"options":{}},"steps":10},"repeat":0,"schema":1}'
    )
    found = identify(Root(), data="d", hardware="cpu")
    assert canonical_json(found.content) == text
    assert found.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert found.hash8 == "6c31df52"


def test_labels_trackers_and_paths_do_not_change_it():
    base = hashed(Root())
    for other in (Root(name="other"), Root(tracker={"kind": "wandb"}), Root(folder=Folder(path="/elsewhere"))):
        assert hashed(other) == base
    assert "name" not in canonical(Root())
    assert "folder" not in canonical(Root())


def test_everything_that_changes_numbers_changes_it():
    variants = [
        hashed(Root()),
        hashed(Root(), data="e"),
        hashed(Root(), hardware="NVIDIA H100"),
        hashed(Root(), repeat=1),
        hashed(Root(), weights="w"),
        hashed(Root(), weights="v"),
        hashed(Root(steps=11)),
        # Another kind with equal values.
        hashed(Root(optimizer=Sgd())),
        hashed(Root(optimizer=Adam(lr=1e-3))),
        hashed(Root(optimizer=Adam(betas=[0.95, 0.9]))),
        hashed(Root(optimizer=Adam(options={"a": 1.0}))),
        hashed(Root(optimizer=Adam(clip=0.0))),
        hashed(Root(extra=False)),
        hashed(Root(extra=0)),
        hashed(Root(extra="0")),
        hashed(Root(extra=[])),
    ]
    assert len(set(variants)) == len(variants)


@given(st.integers(-(2**50), 2**50))
def test_numbers_follow_the_type_of_their_field(number):
    whole, point = (Adam(lr=n, betas=[n], options={"x": n}, clip=n) for n in (number, float(number)))  # type: ignore[arg-type]
    assert hashed(whole) == hashed(point)
    assert canonical(whole)["lr"] == float(number)
    assert isinstance(canonical(whole)["lr"], float)
    # Without a declared type, equal numbers are equal.
    assert hashed(Root(extra=[number])) == hashed(Root(extra=[float(number)]))
    assert isinstance(canonical(Root(steps=number))["steps"], int)


def test_special_numbers():
    assert canonical(Adam(lr=-0.0)) == canonical(Adam(lr=0.0))
    assert canonical_json(canonical(Adam(lr=-0.0))) == canonical_json(canonical(Adam(lr=0.0)))
    names = [canonical(Adam(lr=float(text)))["lr"] for text in ("nan", "inf", "-inf")]
    assert names == ["nan", "inf", "-inf"]
    assert hashed(Root(extra=True)) != hashed(Root(extra=1))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(inner, order)) for key, inner in value.items()]
        order.shuffle(items)
        return dict(items)
    return [shuffled(inner, order) for inner in value] if isinstance(value, list) else value


@settings(max_examples=25)
@given(PLAIN, PLAIN, st.randoms(use_true_random=False))
def test_a_hash_is_that_of_the_value_whatever_the_order_of_its_keys(one, two, order):
    assert hashed(Root(extra=one)) == hashed(Root(extra=shuffled(one, order)))
    same = canonical_json(canonical(one)) == canonical_json(canonical(two))
    assert (hashed(Root(extra=one)) == hashed(Root(extra=two))) is same
    # What is kept in the folder gives the same hash again.
    content = identify(Root(extra=one), data="d", hardware="cpu").content
    assert canonical_json(json.loads(json.dumps(content))) == canonical_json(content)


def test_plain_words_for_paths_enums_and_tuples():
    class Colour(enum.Enum):
        RED = "red"

    assert canonical({"a": Path("x/y"), "b": Colour.RED, "c": (1, 2), 3: None}) == {
        "a": "x/y",
        "b": "red",
        "c": [1, 2],
        "3": None,
    }
    for bad in (object(), {1, 2}, b"bytes", {(1, 2): 3}, Adam):
        with pytest.raises(TypeError):
            canonical(bad)


def grown(before: Any, default: Any, kind: Any = bool) -> Any:
    """Root as a later version has it, with one more field."""
    new = field(default=default, metadata={"before": before})
    return dataclasses.make_dataclass("Root", [("fused", kind, new)], bases=(Root,), kw_only=True)


def test_a_new_field_keeps_old_hashes_where_it_means_what_was_before():
    old = hashed(Root())
    later = grown(before=False, default=False)
    assert hashed(later()) == old
    assert hashed(later(fused=True)) != old
    # Its default may be another one, and may change: the hash goes by the value.
    bold = grown(before=False, default=True)
    assert hashed(bold()) == hashed(later(fused=True))
    assert hashed(bold(fused=False)) == old
    # True is not 1.
    one = grown(before=1, default=1, kind=Any)
    assert hashed(one(fused=1)) == old != hashed(one(fused=True))
    # A new group.
    group = grown(before=Sgd(), default=None, kind=Any)
    assert hashed(group(fused=Sgd())) == old
    assert old not in (hashed(group(fused=Sgd(lr=1.0))), hashed(group(fused=None)))
    assert hashed(grown(before={"kind": "sgd", "lr": 3e-4}, default=None, kind=Any)(fused=Sgd())) == old


def test_data_without_document_masks_keeps_its_hash():
    plain, masked = (Synthetic(document_mask=on) for on in (False, True))
    assert canonical(plain) == {"kind": "synthetic", "vocab_size": 2048}
    assert canonical(masked) == {**canonical(plain), "document_mask": True}
    assert "document_mask" not in {**canonical(Stdlib()), **canonical(TokenFolder(folder="x"))}


@pytest.mark.parametrize(("keys", "hash8"), [({}, "0617de0e"), ({"bf16": True}, "73facad1")])
def test_runs_of_the_last_version_keep_their_names(tmp_path, keys, hash8):
    # What tests/tiny.py described before precisions, checkpointing and optimizers had the fields that they have now.
    assert identify(tiny.recipe(tmp_path, **keys), data="d", hardware="cpu").hash8 == hash8

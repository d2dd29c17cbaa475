"""States of streams: merged when all ranks stand at one place, and checked before one is resumed from."""

from __future__ import annotations

from typing import Any

import pytest

from titanlab.data.contract import check_state, damaged, is_count, merge_states
from titanlab.errors import ConfigError, DamagedPosition


def test_the_state_of_one_rank_is_the_whole() -> None:
    assert merge_states([{"samples": 4}]) == {"samples": 4}
    assert merge_states([{"samples": 4, "parts": {"1": {}, "0": {}}}]) == {"samples": 4, "parts": {"0": {}, "1": {}}}


def test_equal_states_are_one() -> None:
    assert merge_states([{"samples": 4, "seed": 0}] * 3) == {"samples": 4, "seed": 0}


def test_parts_of_all_ranks_are_put_together() -> None:
    states = [{"samples": 4, "parts": {"2": "c", "0": "a"}}, {"parts": {"1": "b"}, "samples": 4}]
    merged = merge_states(states)
    assert merged == {"samples": 4, "parts": {"0": "a", "1": "b", "2": "c"}}
    assert list(merged["parts"]) == ["0", "1", "2"]
    # What was given stays as it is.
    assert states[0] == {"samples": 4, "parts": {"2": "c", "0": "a"}}
    assert merge_states([{"parts": {}}, {"parts": {}}]) == {"parts": {}}


@pytest.mark.parametrize("other", [{"samples": 5}, {"samples": 4, "seed": 0}, {}])
def test_states_of_different_places_are_not_merged(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="data states of different positions cannot be merged: "):
        merge_states([{"samples": 4}, other])


def test_a_state_of_the_same_stream_is_taken() -> None:
    check_state({"samples": 0})
    check_state({"samples": 2**62 - 1, "seed": 3, "fingerprint": "f", "more": 1}, seed=3, fingerprint="f")


@pytest.mark.parametrize(
    ("name", "now", "key"),
    [
        ("seq_len", 8, "training.seq_len"),
        ("seed", 8, "seed"),
        ("streams", 8, "data.streams"),
        ("fingerprint", "g", "data"),
    ],
)
def test_a_state_of_another_stream_is_refused(name: str, now: object, key: str) -> None:
    saved = 4 if isinstance(now, int) else "f"
    with pytest.raises(ConfigError) as caught:
        check_state({"samples": 0, name: saved}, **{name: now})
    assert not isinstance(caught.value, DamagedPosition)
    assert str(caught.value).startswith(
        f"{key}={now}: the checkpoint stands in the data of {name} {saved}; resume with"
    )


@pytest.mark.parametrize("value", [None, "3", 3.0, True, [3]])
def test_a_value_of_another_type_is_damage(value: object) -> None:
    with pytest.raises(DamagedPosition, match=r"^data\.seed=.*: must be of the type of 3; resume from another"):
        check_state({"samples": 0, "seed": value}, seed=3)


def test_damage_is_said_before_a_difference() -> None:
    with pytest.raises(DamagedPosition, match=r"^data\.seed=null"):
        check_state({"samples": 0, "fingerprint": "f"}, fingerprint="g", seed=3)


@pytest.mark.parametrize("value", [None, "3", 3.0, True, -1, 2**62])
def test_samples_are_a_count(value: object) -> None:
    assert not is_count(value)
    with pytest.raises(DamagedPosition, match=r"^data\.samples=.*: must be a whole number from 0"):
        check_state({"samples": value})


def test_the_error_names_the_value() -> None:
    assert (is_count(0), is_count(2**62 - 1)) == (True, True)
    assert str(damaged("parts.3", None, "must be x")) == (
        "data.parts.3=null: must be x; resume from another checkpoint of the run"
    )

"""Actions, their notation, and lists that count microbatches."""

from __future__ import annotations

from titanlab.techniques.schedule.action import Action, ActionList, Kind


def test_an_action_has_torchs_notation():
    assert [str(Action(12, kind, 3)) for kind in Kind] == ["12F3", "12B3", "12I3", "12W3"]


def test_a_list_counts_microbatches():
    made = ActionList()
    made.add(3, Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
    made.add(1, Kind.FORWARD)
    made.add(3, Kind.WEIGHT)
    assert [str(action) for action in made] == ["3F0", "3F1", "3B0", "3I1", "1F0", "3W1"]
    assert made.done(3, Kind.FORWARD) == 2
    assert [str(action) for action in made.up_to(1)] == ["3F0", "3B0", "1F0"]


def test_an_action_of_a_list_is_like_any_other():
    made = ActionList()
    made.add(0, Kind.FORWARD)
    assert type(made[0]) is Action
    assert made == [Action(stage=0, kind=Kind.FORWARD, microbatch=0)]


def test_a_full_backward_counts_as_both_halves():
    made = ActionList()
    made.add(0, Kind.BACKWARD, Kind.BACKWARD, Kind.INPUT)
    assert (made.done(0, Kind.INPUT), made.done(0, Kind.WEIGHT)) == (3, 2)
    assert made.done(1, Kind.INPUT) == 0

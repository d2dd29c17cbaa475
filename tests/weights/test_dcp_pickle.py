"""Pickles that are read as data: plain values come back, names are recorded, and nothing is imported or called."""

from __future__ import annotations

import collections
import pickle
import sys

import pytest

from titanlab.train.dcp_folder import Inert, UnreadablePickle, read_inert


class Thing:
    """Has a state and arguments."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Thing, (self.value,), {"more": [self.value]}


NAME = (Thing.__module__, "Thing")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [None, True, 5, 2**80, 0.5, "é", [], {}, (), [1, [2]], {"a": (1, {"b": None})}])
def test_plain_values_come_back(value, protocol):
    found = read_inert(pickle.dumps(value, protocol), ())
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("value", [b"\0", {3}])
def test_bytes_and_sets_are_values_since_protocol_4(value):
    assert read_inert(pickle.dumps(value, 4), ()) == value
    # Protocol 2 writes them as calls.
    with pytest.raises(UnreadablePickle, match="could run code$"):
        read_inert(pickle.dumps(value, 2), ())


def test_a_call_is_recorded_and_not_made():
    found = read_inert(pickle.dumps(Thing(5)), [NAME])
    assert isinstance(found, Inert)
    assert (found.name, found.args, found.state) == (".".join(NAME), (5,), {"more": [5]})
    assert not isinstance(found, Thing)


def test_a_name_that_is_not_called_is_a_class():
    found = read_inert(pickle.dumps([Thing, Thing]), [NAME])
    assert found[0] is found[1]
    assert issubclass(found[0], Inert)
    assert found[0].name == ".".join(NAME)


def test_one_reading_does_not_change_the_next():
    first = read_inert(pickle.dumps(Thing), [NAME])
    second = read_inert(pickle.dumps(Thing), [NAME])
    assert first is not second
    first.name = "changed"
    assert (second.name, Inert.name) == (".".join(NAME), "")


def test_nothing_is_imported():
    content = b"\x80\x04\x8c\x0bno_such_mod\x8c\x05thing\x93)R."
    found = read_inert(content, [("no_such_mod", "thing")])
    assert (found.name, found.args, found.state) == ("no_such_mod.thing", (), None)
    assert "no_such_mod" not in sys.modules


@pytest.mark.parametrize("names", [(), [(NAME[0], "Other")], [("other", "Thing")]])
def test_a_name_that_is_not_expected_is_refused(names):
    with pytest.raises(UnreadablePickle, match=rf"^asks for {'.'.join(NAME)}, which could run code$"):
        read_inert(pickle.dumps(Thing(1)), names)


def test_a_known_class_of_python_is_refused_too():
    with pytest.raises(UnreadablePickle, match=r"^asks for collections\.OrderedDict, which could run code$"):
        read_inert(pickle.dumps(collections.OrderedDict(a=1)), ())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "EOFError"),
        (b"hello", "UnpicklingError"),
        (b"\x80\xff.", "ValueError"),
        (pickle.dumps([1, 2, 3])[:-2], "UnpicklingError"),
        (b"\x80\x04h\x05.", "UnpicklingError"),
        # A number on the stack is called, and asked for an attribute.
        (b"\x80\x04K\x01)R.", "TypeError"),
        (b"\x80\x04K\x01}b.", "AttributeError"),
    ],
)
def test_damage_is_one_kind_of_error(content, kind):
    with pytest.raises(UnreadablePickle) as caught:
        read_inert(content, ())
    assert str(caught.value).startswith("is damaged (")
    assert caught.value.__cause__ is not None
    assert str(caught.value) == f"is damaged ({type(caught.value.__cause__).__name__})"
    assert type(caught.value.__cause__).__name__ in (kind, "UnpicklingError", "EOFError", "IndexError")

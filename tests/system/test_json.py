"""JSON of strangers is parsed, or refused by a ValueError of one line."""

import pytest

from titanlab.system import parse_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"a": 1', "Expecting"),
        ("[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        ("1" + "0" * 400, "a number in it is larger than any float"),
        ("-" + "9" * 10_000, "a number in it is larger than any float"),
        (b'"\xff"', "can't decode"),
    ],
)
def test_what_cannot_be_parsed_is_one_line(text, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        parse_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_values_are_those_of_json():
    assert parse_json('{"a": [1, -2, 0.5, 1e400, "11"], "b": null}') == {
        "a": [1, -2, 0.5, float("inf"), "11"],
        "b": None,
    }
    assert parse_json(b"1" + b"0" * 300) == 10**300

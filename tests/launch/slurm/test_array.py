"""Elements of arrays, as Slurm 22.05 writes them."""

import pytest

from titanlab.launch.slurm.command import elements_of, expression_of


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("[0]", [0]),
        ("[0%1]", [0]),
        ("[0-3,7%2]", [0, 1, 2, 3, 7]),
        ("[1-9:2]", [1, 3, 5, 7, 9]),
        ("[0-9:2%4]", [0, 2, 4, 6, 8]),
        ("0-2,4", [0, 1, 2, 4]),
        # A list that was cut off names what can be read of it.
        ("[1,3,5...]", [1, 3]),
        ("[1,3,...]", [1, 3]),
        ("", []),
        ("[0-99999999999]", []),
        ("[0-9:0]", []),
        ("[N/A]", []),
    ],
)
def test_elements(text, elements):
    assert elements_of(text) == elements


@pytest.mark.parametrize(
    ("elements", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([7, 0, 1, 3, 3], "0-1,3,7"), (range(1000), "0-999")],
)
def test_an_expression_names_its_elements(elements, text):
    assert expression_of(elements) == text
    assert elements_of(text) == sorted(set(elements))

"""Rules for vocabularies: what no model can use is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlab.data.tokenizer_rules import check_size, check_vocabulary
from titanlab.errors import ConfigError

HERE = Path("here")
VOCABULARY = {"a": 0, "b": 1, "c": 2}


def refusal(action: Any, *given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*given, HERE, "k")
    return str(caught.value)


def test_three_tokens_are_enough() -> None:
    check_size(3, HERE, "k")
    cure = "give the tokenizer.json of a model, or a .model"
    assert refusal(check_size, 0) == f"k=here: has an empty vocabulary; {cure}"
    assert refusal(check_size, 2) == f"k=here: has 2 tokens, which write no text; {cure}"


@pytest.mark.parametrize("description", [None, {}, {"added_tokens": []}, {"added_tokens": [{"content": "c", "id": 2}]}])
def test_a_vocabulary_that_agrees_with_its_file_is_taken(description: Any) -> None:
    check_vocabulary(VOCABULARY, description, HERE, "k")


@pytest.mark.parametrize(("number", "actual"), [(7, 2), (0, 2)])
def test_an_added_token_must_have_the_id_of_its_file(number: int, actual: int) -> None:
    said = refusal(check_vocabulary, VOCABULARY, {"added_tokens": [{"content": "c", "id": number}]})
    assert said == (
        f"k=here: gives its added token 'c' the id {number}, and the tokenizers library gives it {actual}; "
        "fetch the file again"
    )


def test_an_added_token_must_be_there() -> None:
    said = refusal(check_vocabulary, VOCABULARY, {"added_tokens": [{"content": "d", "id": 3}]})
    assert "gives its added token 'd' the id 3, and the tokenizers library gives it None" in said


def test_an_id_is_of_one_token() -> None:
    said = refusal(check_vocabulary, {"a": 0, "b": 1, "c": 1}, None)
    assert said == "k=here: gives the id 1 to two tokens; fetch the file again"


def test_few_ids_are_without_a_token() -> None:
    check_vocabulary({"a": 0, "b": 1, "c": 1005}, None, HERE, "k")
    said = refusal(check_vocabulary, {"a": 0, "b": 1, "c": 1006}, None)
    assert said == (
        "k=here: has ids up to 1006 and only 3 tokens: a model would need a row for every id; "
        "number the tokens from 0 without gaps"
    )

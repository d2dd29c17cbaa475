"""Names of runs and sweeps that can be folders."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.records import check_name


@pytest.mark.parametrize("name", ["a", "1f1b", "fsdp_tp-bf16", "tp8.2", "x" * 100])
def test_a_name_is_taken(name):
    check_name("name", name)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("", "run"),
        ("a+b", "a-b"),
        ("..", "run"),
        (".a", "a"),
        ("-a", "a"),
        ("a b\n", "a-b"),
        ("é", "run"),
        ("x" * 101, "x" * 100),
    ],
)
def test_another_is_refused_with_one_that_is_taken(name, cure):
    with pytest.raises(ConfigError) as caught:
        check_name("sweep", name)
    assert (caught.value.key, caught.value.cure) == ("sweep", f"try {cure}")
    check_name("sweep", cure)

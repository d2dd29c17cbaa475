"""Flags and arguments that the two verbs have in common."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("verb", ["parity", "rehearse"])
@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ("", "arguments=: say nothing of what to"),
        ("--steps 0 +recipe=quickstart", "--steps=0: must lie in 1 to 100; try 3"),
        ("--steps x +recipe=quickstart", "--steps=x: must be a whole number; see `titanlab "),
        (
            "+recipe=quickstart --only",
            "arguments=+recipe=quickstart --only: argument --only: expected one argument; see",
        ),
        ("--processes 999 +recipe=quickstart", "--processes=999: must lie in 1 to 256; try 16"),
        ("nonesuch", "sweep=nonesuch: is no sweep under runs"),
        ("nonesuch seed=2", "recipe=nonesuch: is no recipe and no sweep of conf"),
        ("+recipe=quickstart --only nonesuch", "--only=nonesuch: is in no run's name of quickstart; try quickstart-"),
        ("+recipe=quickstart parallelism=fsdp_tp world=3", "world=3: the other degrees make 2"),
        ("+recipe=quickstart --json --bogus", "arguments="),
    ],
)
def test_bad_input_is_refused(command, verb, arguments, begins):
    said = command(f"{verb} {arguments}")
    assert said.code == 2
    assert said.err.startswith(f"error: {begins}")
    assert said.err.count("\n") == 1

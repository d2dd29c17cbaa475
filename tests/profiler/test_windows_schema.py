"""Configs of profilers: their rules, and when windows begin."""

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.profiler.profilers_schema import Breakdown, Memory, Rates, Trace


@pytest.mark.parametrize(
    ("config", "given", "line"),
    [
        *((config, {"skip": 1}, r"skip=1: must be at least 2; try 5") for config in (Breakdown, Trace)),
        *((config, {"steps": 0}, r"steps=0: must be at least 1; try 3") for config in (Breakdown, Trace, Memory)),
        (Trace, {"every": 4}, r"every=4: must be 0, or at least 5: a window has 3 steps, and one to warm up; try 300"),
        (Memory, {"skip": 0}, r"skip=0: must be at least 1; try 5"),
        (Memory, {"entries": 0}, r"entries=0: must be at least 1; try 100000"),
        (Memory, {"every": 3}, r"every=3: must be 0, or larger than the 3 steps of a window; try 300"),
        (Rates, {"seconds": 0.0}, r"seconds=0\.0: must be a positive number of seconds"),
        (Rates, {"largest": 63}, r"largest=63: must be at least 64"),
        (Rates, {"megabytes": 0}, r"megabytes=0: must be at least 1"),
    ],
)
def test_rules(config, given, line):
    with pytest.raises(ConfigError, match=rf"^profiler\.{line}"):
        config(**given)


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (10, [4, 14, 24])])
def test_the_step_before_each_window_warms_up(every, steps):
    config = Trace(skip=5, steps=3, every=every)
    assert [done for done in range(30) if config.warms_up_after(done)] == steps

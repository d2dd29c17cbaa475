"""Windows of steps that torch.profiler records: their rules, and when they begin."""

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.profiler.profilers_schema import Breakdown, Trace


@pytest.mark.parametrize("config", [Breakdown, Trace])
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"skip": 1}, r"profiler\.skip=1: must be at least 2; try 5"),
        ({"steps": 0}, r"profiler\.steps=0: must be at least 1; try 3"),
        (
            {"every": 4},
            r"profiler\.every=4: must be 0, or at least 5: a window has 3 steps, and one to warm up; try 300",
        ),
    ],
)
def test_rules(config, given, line):
    with pytest.raises(ConfigError, match=line):
        config(**given)


@pytest.mark.parametrize(("every", "steps"), [(0, [4]), (10, [4, 14, 24])])
def test_the_step_before_each_window_warms_up(every, steps):
    config = Trace(skip=5, steps=3, every=every)
    assert [done for done in range(30) if config.warms_up_after(done)] == steps

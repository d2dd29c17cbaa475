"""What tests of reports share."""

import pytest

from tests.sweep.made import Made
from titanlab.report.figures import bars, over_time, scatter


@pytest.fixture
def made(tmp_path):
    """A sweep without runs, to be filled."""
    return Made(tmp_path / "runs")


@pytest.fixture
def drawn(monkeypatch):
    """What each figure is given, by its name; figures take longer than all else, and have tests of their own."""
    given = {}
    for module, name in (
        (scatter, "pareto"),
        (scatter, "estimate_against_measurement"),
        (bars, "throughput_by_layout"),
        (bars, "step_time_split"),
        (over_time, "loss_by_tokens"),
        (over_time, "pipeline_timelines"),
    ):
        monkeypatch.setattr(module, name, lambda *values, name=name, **more: given.setdefault(name, (values, more)))
    return given

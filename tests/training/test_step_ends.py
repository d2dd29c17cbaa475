"""When the steps of a GPU have ended, by the host's clock; events stand for those of a GPU."""

import pytest
import torch

from titanlab.train import train
from titanlab.train.recording import StepEnds


class Event:
    """Reached at a time of the device, in milliseconds."""

    def __init__(self, at):
        self.at = at

    def record(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    """A device that is at 5,000 ms when the host begins."""
    waited = []
    monkeypatch.setattr(train.torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(train.torch.cuda, "Event", lambda enable_timing: Event(5000.0))
    yield torch.device("cuda", 0)
    assert waited == [torch.device("cuda", 0)]


def test_steps_of_a_gpu_end_when_it_has_computed_them(gpu):
    ends = StepEnds(gpu, clock=iter([100.0]).__next__)
    # Whenever the host reads them.
    assert [ends.after(Event(at)) for at in (5250.0, 5500.0, 6500.0)] == [100.25, 100.5, 101.5]


def test_steps_of_a_cpu_end_when_they_are_read():
    assert StepEnds(torch.device("cpu")).after(None) is None

"""A rank's profiler from start to end, and what the run says of a file that could not be written."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from tests.checkpoint.one_process import ALONE
from titanlab.distributed import World
from titanlab.train import train
from titanlab.train.train import profiled


class Profiler:
    """Notes its calls."""

    def __init__(self):
        self.calls = []

    def connect(self, links):
        self.links = links
        self.calls.append("connect")

    def start(self, traces, *, rank, attempt, on_gpu):
        self.calls.append(("start", traces, rank, attempt, on_gpu))

    def close(self):
        self.calls.append("close")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """`made(world)`: the profiler, the recorder's warnings, and the context."""
    monkeypatch.setattr(train, "axis_groups", lambda mesh: {"0": "shard"})

    def context(world=ALONE):
        profiler, warnings = Profiler(), []
        recorder = SimpleNamespace(warn=warnings.append, measured=None)
        run = SimpleNamespace(traces=tmp_path)
        return profiler, warnings, profiled(profiler, run, world, None, recorder, attempt=3)

    return context


def test_a_profiler_is_connected_started_and_closed(made, tmp_path):
    profiler, _, context = made()
    with context:
        assert profiler.calls == ["connect", ("start", tmp_path, 0, 3, False)]
    assert profiler.calls[-1] == "close"
    assert profiler.links.axes == {"0": "shard"}


def test_an_error_of_the_run_closes_it_too(made):
    profiler, _, context = made()
    with pytest.raises(KeyError), context:
        raise KeyError("x")
    assert profiler.calls[-1] == "close"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("no room", "no room"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/trace"), "the disk is full (/x/trace)"),
    ],
)
def test_what_could_not_be_written_is_one_line_and_the_run_goes_on(made, capsys, reason, text):
    profiler, warnings, context = made()
    with context:
        profiler.links.failed("the trace", reason)
    (line,) = warnings
    assert line.startswith("the trace is not written: ")
    assert text in line
    assert line.endswith("; training goes on")
    assert "\n" not in line
    # Rank 0's recorder has a terminal.
    assert capsys.readouterr().err == ""


def test_the_log_of_another_rank_has_the_line(made, capsys):
    world = World(rank=1, world=2, local_rank=1, device=ALONE.device)
    profiler, _, context = made(world)
    with context:
        profiler.links.failed("the trace", "no room")
    assert capsys.readouterr().err == "warning: the trace is not written: no room; training goes on\n"


def test_one_process_has_no_collectives_to_mark(made, monkeypatch):
    monkeypatch.setattr(train, "marked_collectives", None)
    profiler, _, context = made()
    with context, profiler.links.marks_collectives():
        pass

"""The process that writes to wandb, with a wandb that only notes what it is given."""

from __future__ import annotations

import io
import json
import os
import queue
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest

from tests.until import until
from titanlab.techniques.tracker import wandb_writer as module
from titanlab.techniques.tracker.contract import FINISHED, OPEN, read_record


class Wandb:
    """A run of wandb; `raises` ends the call of that name."""

    def __init__(self, folder):
        self.dir, self.calls, self.summary = str(folder / "wandb" / "run-1" / "files"), [], {}

    def log(self, metrics, **given):
        self.calls.append((metrics, given))

    def finish(self, *, exit_code):
        self.calls.append(("finish", exit_code))


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(message, …, None)`: the calls of wandb, the record and the events."""
    made = Wandb(tmp_path)
    monkeypatch.setattr(module, "_open", lambda start, send: made)
    start = {"record": {"path": str(tmp_path / "tracker.json"), "values": {"kind": "wandb"}}}
    start |= {"dir": str(tmp_path), "mode": "offline"}

    def served(*messages):
        events, waiting = [], queue.SimpleQueue()
        for message in ({"start": start}, *messages):
            waiting.put(message)
        module._serve(waiting, lambda event, text="": events.append(event))
        return made, read_record(tmp_path / "tracker.json"), events

    return served


def log(step, **metrics):
    return {"log": {"step": step, "metrics": metrics}}


def finish(rows, **summary):
    return {"finish": {"summary": summary, "exit_code": 0, "rows": rows}}


def test_rows_and_the_summary_reach_wandb(serve):
    made, record, events = serve(log(1, loss=2.0, mfu=None), log(2, loss=1.0), finish(2, loss=0.5, mfu=None))
    # The last row is committed before the summary is set, and null is no value.
    rows = [({"loss": 2.0}, {"step": 1}), ({"loss": 1.0}, {"step": 2}), ({}, {"step": 2, "commit": True})]
    assert made.calls == [*rows, ("finish", 0)]
    assert made.summary == {"loss": 0.5}
    assert (record.state, record.step, record.rows, record.left_out, record.folder) == (
        FINISHED,
        2,
        2,
        0,
        "wandb/run-1",
    )
    assert events == ["started"]


def test_rows_that_were_not_sent_are_counted(serve):
    _, record, _ = serve(log(1, loss=2.0), finish(5))
    assert (record.rows, record.left_out) == (1, 4)


def test_a_row_keeps_its_time_when_it_is_committed(serve):
    made, _, _ = serve(log(7, loss=2.0, _timestamp=5.0), finish(1))
    assert made.calls[1] == ({"_timestamp": 5.0}, {"step": 7, "commit": True})


def test_a_run_without_rows_commits_none(serve):
    made, record, _ = serve(finish(0))
    assert made.calls == [("finish", 0)]
    assert (record.state, record.step) == (FINISHED, None)


def test_if_the_training_dies_the_run_is_closed_as_failed_and_its_record_stays_open(serve):
    made, record, _ = serve(log(1, loss=2.0), None)
    assert made.calls[-1] == ("finish", 1)
    assert (record.state, record.step) == (OPEN, 1)


@pytest.mark.parametrize(("given", "seen"), [("", None), ("offline", "offline")])
def test_an_empty_mode_in_the_environment_is_none(monkeypatch, given, seen):
    """wandb refuses to start with it."""
    fake = SimpleNamespace(init=lambda **_: os.environ.get("WANDB_MODE"), Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", given)
    assert module._open(defaultdict(str), send=None) == seen


def test_without_a_first_message_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(module, "_open", None)
    waiting = queue.SimpleQueue()
    waiting.put(None)
    module._serve(waiting, None)


@pytest.fixture
def pipe(monkeypatch):
    """`pipe(bytes)`: all messages to the end of the pipe."""
    timers = []
    made = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(module.threading, "Timer", lambda seconds, action: timers.append(seconds) or made)

    def messages(content):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        waiting, found = module._messages(), []
        while (message := waiting.get(timeout=10)) is not None:
            found.append(message)
        # A timer that is made after the test would end this process.
        until(lambda: timers)
        return found, timers

    return messages


def test_messages_end_with_the_pipe(pipe):
    given = [log(1, a=1.0), log(2, a=2.0)]
    assert pipe("".join(json.dumps(message) + "\n" for message in given).encode())[0] == given
    assert pipe(b"")[0] == []


@pytest.mark.parametrize("torn", [b'{"log": {"st', b"\xff\n", b"{", b"\0"])
def test_a_training_that_dies_while_it_writes_a_line_has_ended_the_pipe(pipe, torn):
    """The process would wait for ever for a message."""
    found, timers = pipe(json.dumps(log(1)).encode() + b"\n" + torn)
    assert found == [log(1)]
    # A wandb that hangs after this is ended too.
    assert timers == [module._ORPHAN_SECONDS]


def test_rows_are_dropped_while_wandb_hangs_and_the_end_is_not(pipe, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 0)
    given = [{"start": {}}, log(1), log(2), finish(2)]
    found, _ = pipe("".join(json.dumps(message) + "\n" for message in given).encode())
    assert found == [given[0], given[-1]]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (OSError(), "OSError"),
        (KeyError(" "), "KeyError: ' '"),
        (RuntimeError("\n\n"), "RuntimeError"),
    ],
)
def test_an_error_is_one_line_for_people(error, line):
    assert module._first_line(error) == line

"""A sweep on a terminal and in a pipe: what fits, what is cut, and when the watching ends."""

import io
import os
import re
import time
from pathlib import Path

import pytest

from tests.sweep.made import begin, end, train
from titanlab.records import Status
from titanlab.sweep import RunWatch, Screen, SweepFolder, SweepTable, exit_code
from titanlab.sweep import watch as run_watch
from titanlab.sweep.watch import settled

LAYOUTS = SweepFolder(Path("layouts"))
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def screen(columns=80, lines=24, **environ):
    stream = Terminal()
    environ = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines), **environ}
    return stream, Screen(stream, environ=environ, clock=lambda: 1400.0)


def sweep_of(made, count=6, *, label="a-label-of-a-run-that-is-quite-long-and-more"):
    for place in range(count):
        run = made.run(f"{label}-{place}", seed=place, shard=2)
        begin(run)
        if place % 3 == 0:
            train(run, updated=1399.0)
        elif place % 3 == 1:
            end(run)
        else:
            end(run, "oom", cause="CUDA out of memory " + "x" * 200)
    return SweepTable(made.folder)


@pytest.mark.parametrize("columns", [60, 80, 100, 160, 240])
def test_no_line_is_wider_than_the_terminal(made, columns):
    stream, shown = screen(columns)
    rows = sweep_of(made).rows()
    shown.show(LAYOUTS, rows)
    lines = SEQUENCE.sub("", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    heading = next(line for line in lines if line.startswith("run"))
    # These are never given up.
    assert all(name in heading.split() for name in ("run", "state", "step", "tok/s"))
    for row in rows:
        # However narrow, the hash tells a run from the others.
        assert any(line.split()[0].endswith(row["hash8"]) for line in lines if line.strip())


def test_colours_are_left_out_where_they_are_not_wanted(made):
    rows = sweep_of(made).rows()
    coloured, shown = screen()
    shown.show(LAYOUTS, rows)
    plain, shown = screen(NO_COLOR="1")
    shown.show(LAYOUTS, rows)
    assert "\x1b[32mdone" in coloured.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain.getvalue())
    assert SEQUENCE.sub("", coloured.getvalue()) == SEQUENCE.sub("", plain.getvalue())


def test_text_of_others_does_not_control_a_terminal(made):
    run = made.run("toy")
    begin(run)
    end(run, "oom", cause="x\x1b[2J\x1b]0;owned\x07\u202e")
    stream, shown = screen()
    shown.follow(LAYOUTS, SweepTable(made.folder).rows)
    assert "x^[[2J^[]0;owned^G\\u202e" in stream.getvalue()
    assert not re.search("\x1b\\[2J|\x1b]|\x07|\u202e", stream.getvalue())


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": ""}])
def test_a_terminal_that_can_do_nothing_gets_plain_lines(made, environ):
    stream, shown = screen(**environ)
    shown.show(LAYOUTS, sweep_of(made).rows())
    assert "\x1b" not in stream.getvalue()


def test_a_live_view_is_no_higher_than_the_terminal_and_shows_first_what_is_under_way(made):
    table = sweep_of(made, 40, label="r")
    stream, shown = screen(lines=24)

    def look():
        return table.rows()

    def sleep(seconds):
        raise KeyboardInterrupt

    shown.follow(LAYOUTS, look, sleep=sleep)
    # What is drawn before the cursor goes back up.
    drawn = SEQUENCE.sub("", stream.getvalue().split("\x1b[1A")[0].split("\x1b[2K")[0])
    lines = drawn.strip("\r\n").splitlines()
    assert len(lines) <= 24
    states = [line.split()[2] for line in lines if re.match(r"r-\d", line)]
    assert states == ["running"] * len(states)
    assert len(states) >= 5
    assert any("more" in line for line in lines)


def test_watching_ends_when_nothing_runs_or_waits(made):
    table = sweep_of(made, 1)
    (run,) = made.folder.runs()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            end(run)

    for stream, shown in (screen(), (io.StringIO(), None)):
        slept.clear()
        begin(run)
        train(run)
        shown = shown or Screen(stream, environ={}, clock=lambda: 1400.0)
        rows = shown.follow(LAYOUTS, table.rows, seconds=2.0, sleep=sleep)
        assert slept == [2.0] * 3
        assert (settled(rows), rows[0]["outcome"]) == (True, "done")
        assert "1 run: 1 done" in stream.getvalue()


def test_in_a_pipe_changes_are_lines(made):
    table = sweep_of(made, 2, label="r")
    first, second = made.folder.runs()
    stream = io.StringIO()

    def sleep(seconds):
        end(first)

    Screen(stream, environ={}).follow(LAYOUTS, table.rows, sleep=sleep)
    lines = [re.sub(r"^\d\d:\d\d:\d\d", "TIME", line) for line in stream.getvalue().splitlines()]
    assert lines[:5] == [
        f"TIME  {first.path.name}: running",
        f"TIME  {second.path.name}: done",
        "          2 runs: 1 done, 1 running",
        f"TIME  {first.path.name}: done",
        "          2 runs: 2 done",
    ]
    assert lines[5] == "layouts"


DONE = {"state": "ended", "outcome": "done"}
CRASH = {"state": "ended", "outcome": "crash"}
OOM = {"state": "ended", "outcome": "oom"}
DROPPED = {"state": "dropped", "outcome": None}
RUNNING = {"state": "running", "outcome": None}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([], 0),
        ([DONE, DONE], 0),
        ([DROPPED, DONE], 0),
        ([DONE, CRASH, OOM], 1),
        ([DONE, RUNNING], 130),
        ([RUNNING, CRASH], 130),
        ([CRASH, RUNNING], 1),
        ([{"state": "ended", "outcome": "infeasible"}], 2),
    ],
)
def test_the_first_run_that_is_not_done_decides(rows, code):
    assert exit_code(rows) == code


def test_a_run_that_nobody_submitted(made, monkeypatch):
    run = made.run("one")
    assert RunWatch(run).goes_on() == (False, "nobody has started it")
    begin(run)
    run.write_status(Status(state="running", attempt=1, pid=os.getppid()))
    assert RunWatch(run).goes_on() == (True, "")
    with monkeypatch.context() as patch:
        # A step may be long, and a file system may have no locks.
        patch.setattr(run_watch, "_SILENT_SECONDS", -1.0)
        assert RunWatch(run).goes_on() == (True, "")
    run.write_status(Status(state="running", attempt=1, host="another", updated=time.time()))
    assert RunWatch(run).goes_on() == (True, "")
    run.write_status(Status(state="running", attempt=1, host="another", updated=time.time() - 1000))
    with run.claim():
        assert RunWatch(run).goes_on() == (True, "")
    assert RunWatch(run).goes_on() == (False, "nobody works on it any more, and it left no result")
    # Of this host it is known that its process has ended.
    run.write_status(Status(state="running", attempt=1, pid=2**22 + 1, updated=time.time() - 60))
    assert RunWatch(run).goes_on() == (False, "ended: crash")
    end(run, "walltime")
    assert RunWatch(run).goes_on() == (False, "ended: walltime")
    # As a later version may write.
    run.write_status(Status(state="ended", attempt=1, outcome="melted"))
    assert RunWatch(run).goes_on() == (False, "ended: melted")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"state": "queued", "queue_reason": "Resources"}, (True, "waits in the queue: Resources")),
        ({"state": "queued", "queue_reason": None}, (True, "waits in the queue")),
        ({"state": "running", "queue_reason": None, "job_id": "7"}, (True, "")),
        ({"state": "ended", "outcome": "preempted", "cause": None}, (False, "ended: preempted")),
        ({"state": "missing", "outcome": None, "cause": "gone"}, (False, "missing: gone")),
        (None, (False, "is not in its sweep any more")),
    ],
)
def test_a_run_with_a_job_goes_on_as_its_queue_says(made, monkeypatch, row, expected):
    run = made.run("one")
    begin(run)
    end(run, "preempted")
    made.submit(run)
    asked = []

    def look():
        asked.append(1)
        return [] if row is None else [{"run": run.path.name, **row}]

    monkeypatch.setattr(run_watch, "look_at", lambda sweep: look)
    now = [0.0]
    watch = RunWatch(run, clock=lambda: now[0])
    assert watch.goes_on() == watch.goes_on() == expected
    assert len(asked) == 1
    now[0] += 10
    watch.goes_on()
    assert len(asked) == 2


def test_a_later_process_with_the_number_of_a_dead_one_does_not_work_on_its_run(made, monkeypatch):
    run = made.run("one")
    begin(run)
    row = {"run": run.path.name, "state": "running", "job_id": None}
    monkeypatch.setattr(run_watch, "look_at", lambda sweep: lambda: [row])
    run.write_status(Status(state="running", attempt=1, pid=os.getppid(), updated=1000.0))
    assert RunWatch(run).goes_on() == (False, "nobody works on it any more, and it left no result")


def test_an_end_that_is_final_asks_no_queue(made, monkeypatch):
    run = made.run("one")
    begin(run)
    end(run, "done")
    made.submit(run)
    monkeypatch.setattr(run_watch, "look_at", lambda sweep: pytest.fail)
    assert RunWatch(run).goes_on() == (False, "ended: done")

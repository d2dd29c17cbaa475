"""The console in a pipe, on a terminal, and where nobody listens."""

import io
import re
import threading
import time

import pytest

from tests.until import until
from titanlab.system import Console, Progress, error_line

TERMINAL = {"TERM": "xterm-256color"}
ROWS = [("model", "llama [debug]"), ("parameters", "5,769,472"), ("folder", "runs/single/toy-abcd1111")]


class Terminal(io.StringIO):
    """A terminal of 80 columns that keeps what it is sent."""

    encoding = "utf-8"

    def isatty(self):
        return True


class Clock:
    """Seconds that pass when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def at(step, **given):
    return Progress(step=step, steps=100, loss=5.0 - step / 100, **given)


def screen(text, columns=200):
    """What a terminal shows in the end: carriage returns and cleared lines carried out."""
    shown, line, column = [], [], 0
    for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z]|[\r\n])", text):
        if part == "\n":
            shown.append("".join(line).rstrip())
            line, column = [], 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            line = []
        elif not part.startswith("\x1b"):
            line[column : column + len(part)] = part
            column += len(part)
    return [*shown, "".join(line)] if line else shown


def test_a_pipe_gets_plain_lines():
    out, errors = io.StringIO(), io.StringIO()
    with Console(out, errors=errors, environ=TERMINAL) as console:
        assert not console.is_live
        console.start("titanlab · toy", ROWS)
        for step in range(1, 21):
            console.step(at(step))
            if step % 10 == 0:
                console.log(at(step))
        console.validated(20, 100, 4.5)
        console.warn("wandb:\n no host")
        console.end("done", [("steps", "20 of 20")], next_steps=["titanlab generate toy"])
    assert out.getvalue() == (
        "titanlab · toy\n"
        "  model       llama [debug]\n"
        "  parameters  5,769,472\n"
        "  folder      runs/single/toy-abcd1111\n"
        "step  10/100  loss 4.9000\n"
        "step  20/100  loss 4.8000\n"
        "step  20/100  validation loss 4.5000\n"
        "done\n"
        "  steps  20 of 20\n"
        "next:\n"
        "  titanlab generate toy\n"
    )
    assert errors.getvalue() == "warning: wandb: no host\n"


def test_a_terminal_has_one_line_that_lives():
    out, clock = Terminal(), Clock()
    console = Console(out, errors=out, environ=TERMINAL, clock=clock)
    assert console.is_live
    for step in range(1, 51):
        clock.now += 0.0625
        console.step(at(step))
    # Every fourth, which is the first that comes after 0.2 seconds.
    assert out.getvalue().count("\r\x1b[2K") == 13
    console.close()
    shown = screen(out.getvalue())
    assert len(shown) == 1
    # The last state is shown even if it came too soon to be drawn.
    assert " 50/100  loss 4.5000" in shown[0]


def test_every_group_of_steps_leaves_a_line_on_a_terminal():
    out = Terminal()
    console = Console(out, environ=TERMINAL, clock=Clock())
    for step in (10, 20, 30):
        console.log(at(step))
        console.step(at(step + 1))
    console.log(at(40))
    assert "  40/100  loss 4.6000" in screen(out.getvalue())[-1]
    console.close()
    # The last line that lives showed what the line above it shows, and is gone.
    assert screen(out.getvalue()) == [f"step  {step}/100  loss {at(step).loss:.4f}" for step in (10, 20, 30, 40)]
    assert "█" in out.getvalue()


def test_what_is_done_before_the_first_step_is_named_with_its_seconds():
    out, clock = Terminal(), Clock()
    with Console(out, environ=TERMINAL, clock=clock) as console:
        console.phase("importing torch")
        assert screen(out.getvalue()) == ["importing torch …"]
        clock.now += 3
        until(lambda: screen(out.getvalue()) == ["importing torch … 3 s"])
        console.note("a note")
        assert screen(out.getvalue()) == ["a note", "importing torch … 3 s"]
        console.phase("step 1")
        assert screen(out.getvalue()) == ["a note", "step 1 …"]
        console.step(at(1))
        assert screen(out.getvalue())[1].endswith("1/100  loss 4.9900")
        console.phase("the end")
    assert screen(out.getvalue())[0] == "a note"
    assert "the end" not in "".join(screen(out.getvalue()))
    assert not [thread for thread in threading.enumerate() if thread.name == "terminal"]


def test_a_pipe_hears_of_a_phase_only_if_it_lasts():
    out, clock = io.StringIO(), Clock()
    with Console(out, environ=TERMINAL, clock=clock) as console:
        console.phase("rendezvous of 8 ranks")
        clock.now += 29
        time.sleep(0.6)
        assert out.getvalue() == ""
        clock.now += 2
        until(lambda: out.getvalue() == "rendezvous of 8 ranks … 31 s\n")
        clock.now += 100
        time.sleep(0.6)
    assert out.getvalue() == "rendezvous of 8 ranks … 31 s\n"


def test_lines_that_stay_stand_above_the_line_that_lives():
    out = Terminal()
    console = Console(out, errors=out, environ=TERMINAL, clock=Clock())
    console.step(at(1))
    console.note("saved")
    console.warn("careful")
    console.error("sorry")
    console.validated(1, 100, 4.5)
    shown = screen(out.getvalue())
    assert shown[:4] == ["saved", "warning: careful", "error: sorry", "step   1/100  validation loss 4.5000"]
    assert "  1/100" in shown[4]
    assert len(shown) == 5
    console.end("done", [("steps", 1)])
    shown = screen(out.getvalue())
    assert "  1/100" in shown[4]
    assert shown[5].startswith("╭─ done ─")


def test_panels_keep_every_word_and_fold_long_ones(monkeypatch):
    # Of the process, in which the tests run.
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    console = Console(out, environ=TERMINAL)
    path = "/" + "x" * 150
    console.start("titanlab · toy", [*ROWS, ("long", path)])
    shown = screen(out.getvalue())
    assert all(len(line) <= 79 for line in shown)
    assert len({len(line) for line in shown}) == 1
    assert "llama [debug]" in shown[1]
    assert path in "".join(line[1:-1].removeprefix(" long").strip() for line in shown)


def test_text_of_others_does_not_control_a_terminal():
    out, evil = Terminal(), "x\x1b[2J\x1b]0;owned\x07\u202e"
    console = Console(out, errors=out, environ=TERMINAL)
    console.start(evil, [(evil, evil)])
    console.phase(evil)
    console.note(evil)
    console.warn(evil)
    console.end(evil, [(evil, evil)], next_steps=[evil])
    error_line(evil, errors=out, environ=TERMINAL)
    assert "x^[[2J^[]0;owned^G\\u202e" in out.getvalue()
    # What is left is titanlab's own: colours, and the line that is redrawn.
    assert not re.search("[\x00-\x09\x0b-\x0c\x0e-\x1f\u202e]", re.sub(r"\x1b\[(2K|[0-9;]*m)", "", out.getvalue()))


@pytest.mark.parametrize("tone", ["good", "halted", "bad"])
def test_the_end_has_the_colour_of_its_tone(tone):
    out = Terminal()
    Console(out, environ=TERMINAL).end("over", [("steps", 1)], tone=tone, next_steps=["titanlab x"])
    assert {"good": "\x1b[32m", "halted": "\x1b[33m", "bad": "\x1b[31m"}[tone] in out.getvalue()
    assert out.getvalue().endswith("next:\n  titanlab x\n")


def test_no_color_keeps_the_line_and_drops_the_colours():
    out = Terminal()
    console = Console(out, errors=out, environ={**TERMINAL, "NO_COLOR": "1"}, clock=Clock())
    console.start("toy", ROWS)
    console.log(at(1))
    console.warn("careful")
    console.end("done", ROWS, tone="bad")
    assert set(re.findall(r"\x1b\[[0-9;]*[A-Za-z]", out.getvalue())) == {"\x1b[2K"}
    assert "┄" in out.getvalue()


@pytest.mark.parametrize("term", ["dumb", "", "unknown", None])
def test_a_dumb_terminal_gets_plain_lines(term):
    out = Terminal()
    console = Console(out, errors=out, environ={} if term is None else {"TERM": term})
    console.start("toy", ROWS)
    console.step(at(1))
    console.log(at(2))
    console.warn("careful")
    console.close()
    assert not console.is_live
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert out.getvalue().splitlines()[-2:] == ["step   2/100  loss 4.9800", "warning: careful"]


def test_a_terminal_that_knows_ascii_only():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    out.isatty = lambda: True
    console = Console(out, errors=out, environ=TERMINAL, clock=Clock())
    console.start("titanlab · toy", [("shape", "8 × 512 é")])
    console.log(at(50))
    console.end("done", ROWS)
    text = raw.getvalue().decode("ascii")
    assert "+- titanlab - toy -" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "8 x 512 ?" in text
    assert "[======" in text
    assert "50/100" in text


def test_the_log_file_has_the_plain_lines_with_their_time(tmp_path):
    out = Terminal()
    path = tmp_path / "rank-0.log"
    for attempt in (1, 2):
        with Console(out, errors=out, log_file=path, environ=TERMINAL, time_of_day=lambda: "12:00:00") as console:
            console.start(f"attempt {attempt}", [("a", 1)])
            console.step(at(1))
            console.log(at(10))
            console.warn("careful")
            console.end("done", [], next_steps=["x"])
    assert path.read_text().splitlines()[:7] == [
        "12:00:00  attempt 1",
        "12:00:00    a  1",
        "12:00:00  step  10/100  loss 4.9000",
        "12:00:00  warning: careful",
        "12:00:00  done",
        "12:00:00  next:",
        "12:00:00    x",
    ]
    assert len(path.read_text().splitlines()) == 14


class Gone(Terminal):
    """A stream whose other end is lost."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), OSError(28, "No space left"), ValueError("closed file")]
)
@pytest.mark.parametrize("environ", [TERMINAL, {}])
def test_output_that_nobody_takes_does_not_end_a_run(error, environ):
    out = Gone(error)
    console = Console(out, errors=out, environ=environ, clock=Clock())
    console.start("toy", ROWS)
    console.log(at(1))
    console.note("saved")
    console.warn("careful")
    console.end("done", ROWS, next_steps=["x"])
    console.close()
    error_line("sorry", errors=out, environ=environ)
    assert out.getvalue() == ""


def test_error_line_is_one_line():
    errors = io.StringIO()
    error_line("a=1: must\nbe 2", errors=errors)
    assert errors.getvalue() == "error: a=1: must be 2\n"
    coloured = Terminal()
    error_line("no", errors=coloured, environ=TERMINAL)
    assert coloured.getvalue() == "\x1b[31merror:\x1b[0m no\n"

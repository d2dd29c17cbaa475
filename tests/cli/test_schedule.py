"""`titanlab schedule`: what it prints and writes, and its refusals."""

from __future__ import annotations

import sys

import pytest

from tests.schedule.conftest import KINDS, Schedule
from titanlab.techniques.schedule.csv_schema import read_actions

VERB = "schedule"


@pytest.fixture
def schedule(tmp_path, monkeypatch, say):
    """`schedule("zbv --ranks 2")`: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return lambda line: say(*line.split())


def test_a_timeline_in_a_pipe_is_plain(schedule):
    assert schedule("1f1b --ranks 2 --microbatches 3") == (
        0,
        """\
1f1b: 2 ranks, 3 microbatches, 1 stage a rank

rank 0 F0F1....B0--F2B1--..B2--
rank 1 ..F0B0--F1B1--F2B2--....

F forward, B backward

step            12 (a rank's layers take F 1, B 2, I 1, W 1)
bubble          25.0 % of all ranks' time
peak in flight  2 1 microbatches, by rank
""",
        "",
    )


def test_small_letters_are_later_stages(schedule):
    _, out, _ = schedule("zbv --ranks 2 --microbatches 3")
    assert "rank 0 F0F1F2f0i0w0f1i1w1I0W0f2i2w2I1W1I2W2..\nrank 1 ..F0f0F1f1i0w0" in out
    assert "small letters: not the rank's first stage" in out


def test_durations_are_of_a_ranks_layers(schedule):
    _, out, _ = schedule("gpipe --ranks 2 --microbatches 4 --forward 2 --backward 3 --transfer 0.5")
    assert "step            26 (a rank's layers take F 2, B 3, I 1.5, W 1.5, transfer 0.5)" in out
    # Twice the stages, each half as long: the work is the same, the idle time half.
    _, out, _ = schedule("looped_bfs --ranks 2 --microbatches 4 --forward 2 --backward 4")
    assert "step            27 " in out
    assert "bubble          11.1 %" in out


def test_all_are_compared(schedule):
    code, out, _ = schedule("all --ranks 4 --microbatches 8 --stages-per-rank 3")
    table = out.splitlines()
    assert (code, table[0]) == (0, "4 ranks, 8 microbatches")
    assert {line.split()[0] for line in table[4:]} == set(KINDS)
    assert table[-2:] == [
        "1f1b                                 1    33  27.3 %  4 3 2 1",
        "gpipe                                1    33  27.3 %  8 8 8 8",
    ]
    assert next(line for line in table if line.startswith("looped_bfs")).split()[1] == "3"
    _, out, _ = schedule("all --ranks 16 --microbatches 8")
    assert "dualpipe_v: needs at least 32 microbatches" in out.splitlines()[-1]
    assert "8 8 8 8 8 8 … 1" in out


def test_a_csv_that_was_written_is_read(schedule, tmp_path):
    code, out, _ = schedule("dualpipe_v --ranks 3 --microbatches 7 --csv my.csv")
    assert (code, out.splitlines()[-1]) == (0, "csv: my.csv")
    assert read_actions(tmp_path / "my.csv") == Schedule("dualpipe_v").actions(3, 7)
    code, again, _ = schedule("csv --file my.csv")
    assert code == 0
    assert again.splitlines()[1:] == out.splitlines()[1:-1]
    assert again.startswith("csv: 3 ranks, 7 microbatches, 2 stages a rank")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture(schedule, tmp_path, ending):
    path = tmp_path / f"timeline.{ending}"
    assert schedule(f"zbv --ranks 2 --microbatches 3 --plot {path}")[0] == 0
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert schedule(f"zbv --ranks 2 --microbatches 3 --plot {path}")[0] == 0
    assert path.read_bytes() == first


def test_without_matplotlib(schedule, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = schedule("1f1b --plot x.png")
    assert (code, out) == (2, "")
    assert err == (
        "error: --plot=x.png: needs matplotlib, which is not installed; pip install matplotlib, or leave --plot out\n"
    )

"""What stands on a terminal before the first step: within two seconds, and then at every stage."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(arguments, folder, *, seconds=120.0, **variables):
    """Every piece of text that a command shows on a terminal of 80 columns, with the seconds after its start."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", **variables}
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlab", *arguments],
        **dict.fromkeys(("stdin", "stdout", "stderr"), follower),
        cwd=folder,
        env=environ,
        start_new_session=True,
    )
    os.close(follower)
    pieces = []
    while time.monotonic() < begin + seconds:
        if not select.select([leader], [], [], 0.1)[0]:
            continue
        try:
            piece = os.read(leader, 65536)
        except OSError:  # How Linux says that the other end is closed.
            break
        if text := SEQUENCE.sub("", piece.decode()).strip():
            pieces.append((time.monotonic() - begin, text))
    os.close(leader)
    assert process.wait(60) is not None
    return pieces


def test_something_stands_there_within_two_seconds(tmp_path):
    # Other work on the machine may have the cores: what is slow is slow each time.
    for _ in range(3):
        pieces = shown(["train", "training.steps=0"], tmp_path)
        assert pieces[0][1].startswith("composing the recipe …")
        assert pieces[-1][1].endswith("error: training.steps=0: must be at least 1; try 1000")
        if pieces[0][0] < 2.0:
            break
    assert pieces[0][0] < 2.0


def test_a_dumb_terminal_has_no_line_that_is_redrawn(tmp_path):
    (piece,) = shown(["train", "training.steps=0"], tmp_path, TERM="dumb")
    assert piece[1] == "error: training.steps=0: must be at least 1; try 1000"


@pytest.mark.full
@pytest.mark.parametrize(("world", "meets"), [(1, "opening the device"), (2, "rendezvous of 2 ranks")])
def test_what_lasts_is_named_in_order(tmp_path, world, meets):
    recipe = ["model=debug", "data=synthetic", "training.steps=4", "training.seq_len=32", "training.global_batch=4"]
    layout = ["parallelism=ddp"] if world > 1 else []
    pieces = shown(["train", *recipe, *layout, f"world={world}", "training.log_every=2"], tmp_path)
    text = "\n".join(piece for _, piece in pieces)
    stages = ["composing the recipe", "checking the recipe", "importing torch", meets, "building the model"]
    stages += [
        "loading the state",
        "opening the data",
        "titanlab · run",
        "step 1 …",
        "1/4  loss",
        "2/4  loss",
        "done: ",
    ]
    places = [text.find(stage) for stage in stages]
    assert -1 not in places, dict(zip(stages, places, strict=True))
    assert places == sorted(places)
    # Every group of steps has left a line with all that is important.
    for step in (1, 2, 4):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{step}/4"))
        assert all(word in line for word in ("loss", "grad", "lr", "tok/s", "MFU", "G"))

"""A lock on a folder, which ends with the process that has it."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.until import until
from titanlab.errors import ConfigError
from titanlab.records import CannotWriteError, claimed, is_claimed
from titanlab.system import process_state

HOLD = """
import sys, time
from pathlib import Path
from titanlab.records.claim import claimed
with claimed(Path(sys.argv[1]), "run"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_at_a_time(tmp_path):
    assert not is_claimed(tmp_path)
    with claimed(tmp_path, "run"):
        assert is_claimed(tmp_path)
        with pytest.raises(ConfigError, match="is in the hands of process") as refused:
            with claimed(tmp_path, "run", patience_seconds=0):
                pass
        assert refused.value.key == "run"
    assert not is_claimed(tmp_path)


def test_a_claim_ends_with_its_process_and_one_that_is_stopped_is_named(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    assert is_claimed(tmp_path)
    holder.send_signal(signal.SIGSTOP)
    until(lambda: process_state(holder.pid) == "T")
    with pytest.raises(ConfigError) as refused, claimed(tmp_path, "run", patience_seconds=0):
        pass
    holder.kill()
    holder.communicate()
    assert refused.value.rule == (
        f"is in the hands of process {holder.pid} on {socket.gethostname()}, "
        f"which is stopped: `kill -CONT {holder.pid}` lets it go on"
    )
    assert not is_claimed(tmp_path)


def test_whoever_only_asks_is_in_nobodys_way(tmp_path):
    done = threading.Event()

    def ask():
        while not done.is_set():
            is_claimed(tmp_path)

    asker = threading.Thread(target=ask)
    asker.start()
    taken = 0
    try:
        for _ in range(20):
            with claimed(tmp_path, "run"):
                taken += 1
    finally:
        done.set()
        asker.join()
    assert taken == 20


def test_there_is_patience(tmp_path):
    held = claimed(tmp_path, "sweep")
    held.__enter__()
    timer = threading.Timer(0.2, held.__exit__, (None, None, None))
    timer.start()
    with claimed(tmp_path, "sweep", patience_seconds=30):
        assert is_claimed(tmp_path)
    timer.join()


def test_a_stranger_s_folder_cannot_lead_the_claim_to_another_file(tmp_path):
    """The claim empties its file and writes the holder into it."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".claim").symlink_to("precious")
    assert not is_claimed(tmp_path)
    with pytest.raises(CannotWriteError, match="cannot be written \\(is a symbolic link"), claimed(tmp_path, "run"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
    # To open a pipe for reading would wait for a writer.
    (tmp_path / ".claim").unlink()
    os.mkfifo(tmp_path / ".claim")
    assert not is_claimed(tmp_path)
    with pytest.raises(CannotWriteError, match="is no regular file"), claimed(tmp_path, "run"):
        pass

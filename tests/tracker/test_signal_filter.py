"""Signals that are ignored for good: also by programs that ask the kernel for them."""

import signal
import subprocess
import sys

import pytest

ASKS = """
import os, signal, sys
# Not print: the signal may come while "ready" is still being written.
def heard(number, frame): os.write(1, f"heard {number}\\n".encode())
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGUSR1, heard)
print("ready", flush=True)
sys.stdin.readline()
"""
FILTERS = """
import os, signal, sys
from titanlab.techniques.tracker.wandb import ignore_signals
print(ignore_signals([signal.SIGTERM]), flush=True)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")
def test_a_program_that_asks_for_a_signal_does_not_get_it():
    process = subprocess.Popen(
        [sys.executable, "-c", FILTERS, ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    # One that is not in the filter comes through, as before.
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate("\n", timeout=60)
    assert out == f"heard {int(signal.SIGUSR1)}\n"
    assert process.returncode == 0

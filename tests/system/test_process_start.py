"""When a process has started, by Linux."""

import os
import subprocess
import sys
import time

import pytest

from titanlab.system import process_start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known")


def test_a_process_has_started_between_the_call_that_makes_it_and_its_first_output():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        start = process_start(process.pid)
    # The kernel counts in hundredths of a second.
    assert before - 0.02 <= start <= after + 0.02
    assert process_start(os.getpid()) < before


def test_of_a_process_that_is_gone_it_is_not_known():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert process_start(process.pid) is None

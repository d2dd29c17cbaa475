"""A wish to stop."""

import os
import signal
import threading
import time

import pytest

from titanlab import stop
from titanlab.stop import stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_the_flag_and_one_that_is_no_echo_ends(number, monkeypatch):
    monkeypatch.setattr(stop, "ONE_WISH_SECONDS", 0.2)
    before = signal.getsignal(number)
    with stop_request() as request:
        assert request.signal == 0
        os.kill(os.getpid(), number)
        assert request.signal == number
        os.kill(os.getpid(), number)
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def run():
        with stop_request() as request:
            seen.append(request.signal)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [0]

"""What is done before the first step: the thread that redraws it."""

import threading

from titanlab.system.terminal import Phase


def test_no_thread_of_an_earlier_phase_is_left():
    """One that draws when its phase ends is waited for, though another phase has begun since."""
    drawing, may_end = threading.Event(), threading.Event()

    def tick():
        drawing.set()
        may_end.wait(5)

    phase = Phase(tick)
    phase.begin("first")
    assert drawing.wait(5)
    phase.begin(None)
    phase.begin("second")
    threading.Timer(0.1, may_end.set).start()
    phase.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "terminal"]

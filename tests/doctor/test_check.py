"""Checks run at the same time; one that hangs or fails is a line of the report."""

import threading
import time

from titanlab.doctor import run_checks
from titanlab.doctor.checkup import Check
from titanlab.system import ok


def test_a_check_that_hangs_or_raises_is_a_finding_and_delays_nobody():
    forever = threading.Event()

    def hang():
        forever.wait(60)
        return []

    def broken():
        yield ok("first", "is lost with the rest")
        raise OSError(5, "Input/output error")

    checks = [
        Check(section="a", name="disk", find=hang, seconds=0.2),
        Check(section="a", name="clock", find=hang, seconds=0.2, is_needed=False),
        Check(section="b", name="driver", find=broken),
        Check(section="b", name="good", find=lambda: [ok("good", "works")]),
    ]
    begin = time.monotonic()
    found = [(check.name, [(each.state, each.text) for each in findings]) for check, findings in run_checks(checks)]
    forever.set()
    assert time.monotonic() - begin < 5
    assert found == [
        ("disk", [("fail", "gave no answer within 0.2 s")]),
        ("clock", [("warn", "gave no answer within 0.2 s")]),
        ("driver", [("fail", "could not be checked (OSError: [Errno 5] Input/output error)")]),
        ("good", [("ok", "works")]),
    ]

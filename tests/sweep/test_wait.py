"""The exit code of a sweep that was followed, from the rows of its table."""

import pytest

from titanlab.sweep import exit_code

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


def test_outcomes_have_codes_of_their_own():
    codes = {exit_code([DONE, row]) for row in (CRASH, OOM, RUNNING, DONE)}
    assert len(codes) == 4

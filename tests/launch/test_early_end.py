"""Why a job failed before its run began, from the logs of its processes."""

import os

import pytest

from titanlab.launch.evidence import early_end, printed_lines

SRUN = "srun: error: n1: task 0: Exited with exit code 2"
EXECVE = "slurmstepd: error: execve(): /gone/bin/python: No such file or directory"


@pytest.fixture
def end(tmp_path):
    """`end({"7_0_log.err": "text"})`: what these logs of a job say."""

    def of(logs, **given):
        for name, text in logs.items():
            (tmp_path / name).write_text(text)
        return early_end(tmp_path.glob("*_log.*"), **given)

    return of


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        ({"7_0_log.err": "Traceback (most recent call last):\n  File\nImportError: no x\n\n"}, "ImportError: no x"),
        # The lowest rank by number: 10 is after 2.
        ({"7_0_log.err": "", "7_10_log.err": "of 10", "7_2_log.err": "of 2"}, "of 2"),
        # A number of a Slurm job and its index in the array are none of a rank.
        ({"99_3_1_log.err": "of 1", "99_3_0_log.err": "of 0"}, "of 0"),
        ({"7_0_log.out": "10:00:00  error: run: refused\n10:00:01  more\n", "7_1_log.err": "from 1"}, "from 1"),
        ({"7_0_log.out": "10:00:00  error: run: refused\n10:00:01  more\n", "7_0_log.err": ""}, "run: refused"),
        ({"7_0_log.err": 'srun: bad --x\nTry "srun --help" for more information\n'}, "srun: bad --x"),
        ({"7_0_log.err": "env: bad --x\nTry 'env --help' for more information.\n"}, "env: bad --x"),
        ({"7_0_log.err": "a\x1b[31m red\r\n"}, "a [31m red"),
    ],
)
def test_the_last_line_of_the_lowest_rank_says_why(end, logs, line):
    assert end(logs) == f"ended before the run began: {line}"


@pytest.mark.parametrize(
    "logs", [{}, {"7_0_log.err": " \n\n"}, {"7_0_log.out": "10:00:00  run, attempt 1: 1 processes\n"}]
)
def test_logs_without_an_error_say_nothing(end, logs):
    assert end(logs) is None


@pytest.mark.parametrize(("text", "line"), [(f"{EXECVE}\n{SRUN}\n", EXECVE), (f"{SRUN}\n", SRUN)])
def test_lines_of_a_scheduler_are_used_only_if_there_are_no_others(end, text, line):
    assert end({"9_0_0_log.err": text}, besides="srun: ") == f"ended before the run began: {line}"


def test_lines_before_a_byte_are_left_out_and_long_lines_are_cut(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"old\nnew\n{'x' * 1000}\n")
    assert [line[:5] for line in printed_lines(path, begin=4)] == ["new", "xxxxx"]
    assert len(printed_lines(path)[-1]) == 400
    assert printed_lines(tmp_path / "none") == []


def test_a_pipe_in_the_place_of_a_log_says_nothing_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "7_0_log.err")
    assert early_end(tmp_path.glob("*_log.*")) is None

"""Why a job ended: kills by the kernel, printed lines, and hosts that are remembered."""

from dataclasses import replace

import pytest

from tests import tiny
from titanlab.launch import bad_hosts, clear_bad_hosts, host_names, memory_kills
from titanlab.launch.evidence import MemoryKills, early_end, note_bad_host, printed_lines, suspect
from titanlab.records import KillEvidence, Outcome, OutcomeKind

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
        *((logs, None) for logs in ({}, {"7_0_log.err": " \n\n"}, {"7_0_log.out": "10:00:00  run, attempt 1: 1\n"})),
    ],
)
def test_the_last_line_of_the_lowest_rank_says_why(end, logs, line):
    assert end(logs) == (line and f"ended before the run began: {line}")


@pytest.mark.parametrize(("text", "line"), [(f"{EXECVE}\n{SRUN}\n", EXECVE), (f"{SRUN}\n", SRUN)])
def test_lines_of_a_scheduler_are_used_only_if_there_are_no_others(end, text, line):
    assert end({"9_0_0_log.err": text}, besides="srun: ") == f"ended before the run began: {line}"


def test_lines_before_a_byte_are_left_out_and_long_lines_are_cut(tmp_path):
    path = tmp_path / "log"
    path.write_text(f"old\nnew\n{'x' * 1000}\n")
    assert [line[:5] for line in printed_lines(path, begin=4)] == ["new", "xxxxx"]
    assert len(printed_lines(path)[-1]) == 400
    assert printed_lines(tmp_path / "none") == []


NODES = ("n1", "n2", "n3")
KILLED = Outcome(kind=OutcomeKind.CRASH, rank=5, exit_code=-11, cause="segmentation fault")


@pytest.mark.parametrize(
    ("outcome", "nodes", "host"),
    [
        (KILLED, NODES, "n3"),
        (replace(KILLED, rank=0), NODES, "n1"),
        (replace(KILLED, rank=None), NODES, None),
        (replace(KILLED, rank=None), ("n1",), "n1"),
        (replace(KILLED, rank=9), NODES, None),
        (replace(KILLED, kind=OutcomeKind.HANG, rank=2, exit_code=None), NODES, "n2"),
        (replace(KILLED, kind=OutcomeKind.NODE_FAIL, exit_code=None), NODES, "n3"),
        (replace(KILLED, traceback="Traceback"), NODES, None),
        (replace(KILLED, exit_code=1), NODES, None),
        *((replace(KILLED, kind=kind), NODES, None) for kind in (OutcomeKind.OOM, OutcomeKind.NAN, OutcomeKind.DATA)),
        (Outcome(kind=OutcomeKind.DONE), ("n1",), None),
    ],
)
def test_only_what_a_host_may_have_caused_counts(outcome, nodes, host):
    assert suspect(outcome, nodes, ranks_per_node=2) == host


@pytest.fixture
def run(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path / "runs"))
    note_bad_host(run, KILLED, "n3")
    note_bad_host(run, replace(KILLED, kind=OutcomeKind.HANG, attempt=2), "n1")
    note_bad_host(run, KILLED, "n3")
    return run


def test_hosts_are_remembered_and_cleared(run):
    runs = run.path.parent.parent
    assert host_names(bad_hosts(runs)) == ["n3", "n1"]
    assert [(bad.host, bad.kind, bad.attempt) for bad in bad_hosts(runs)][1] == ("n1", "hang", 2)
    assert clear_bad_hosts(runs, "n3") == 2
    assert host_names(bad_hosts(runs)) == ["n1"]
    assert clear_bad_hosts(runs) == 1
    assert bad_hosts(runs) == bad_hosts(runs / "none") == []


def test_names_that_are_flags_and_damaged_lines_are_skipped(run):
    runs = run.path.parent.parent
    note_bad_host(run, KILLED, "--wrap=touch x")
    with (runs / "hosts.jsonl").open("ab") as file:
        file.write(b'{"host": "n9,--x", "run": "r", "attempt": 1, "kind": "hang", "cause": "c", "time": 1}\n')
        file.write(b"[]\n\xc3\xa4\n" + b"[" * 200_000 + b'\n{"host": "n9"}\n')
    assert host_names(bad_hosts(runs)) == ["n3", "n1"]


def test_a_cause_with_a_separator_of_unicode_is_one_line(run):
    runs = run.path.parent.parent
    note_bad_host(run, replace(KILLED, cause="a\u2028b\x85c"), "n5")
    assert bad_hosts(runs)[-1].cause == "a\u2028b\x85c"


NOBODY = KillEvidence(
    by_kernel=False,
    words="the kernel has killed nothing for want of memory, so a person or another program has sent it",
)
V2 = "0::/user.slice/job\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"


@pytest.fixture
def root(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        (V2, "sys/fs/cgroup/user.slice/job/memory.events"),
        # In a container the mount begins at the group.
        (V2, "sys/fs/cgroup/memory.events"),
        (V1, "sys/fs/cgroup/memory/docker/abc/memory.oom_control"),
        (V1, "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_the_control_group_counts(root, groups, file):
    root("proc/vmstat", "oom_kill 9\n")
    root("proc/self/cgroup", groups)
    place = root(file, "low 0\noom 3\noom_kill 1\noom_group_kill 0\n")
    before = memory_kills(place)
    assert before == MemoryKills("its control group", 1, 9)
    assert before.evidence(place) == NOBODY
    # A process of another control group, or of this one before its counter shows it.
    root("proc/vmstat", "oom_kill 10\n")
    assert before.evidence(place) is None
    root(file, "oom_kill 2\n")
    # What happens elsewhere on the machine is another's.
    assert before.evidence(place) == KillEvidence(
        by_kernel=True, words="the kernel has killed a process of its control group for want of memory"
    )


def test_where_no_group_counts_the_machine_does(root):
    place = root("proc/vmstat", "nr_free_pages 5\noom_kill 4\n")
    before = memory_kills(place)
    assert before == MemoryKills("this machine", 4, 4)
    assert before.evidence(place) == NOBODY
    root("proc/vmstat", "oom_kill 5\n")
    assert before.evidence(place) == KillEvidence(
        by_kernel=True, words="the kernel has killed a process of this machine for want of memory"
    )


def test_a_kernel_that_counts_nothing_shows_nothing(root, tmp_path):
    before = memory_kills(tmp_path)
    assert before == MemoryKills("", 0)
    root("proc/vmstat", "oom_kill 5\n")
    assert before.evidence(tmp_path) is None

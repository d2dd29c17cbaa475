"""Records of the kernel's log about processes that it has killed, from logs that were made up."""

import os
import threading

import pytest

from titanlab.launch.kernel_log import Killed, kernel_log

OLD = "6,100,5000,-;Linux version 6.1\n SUBSYSTEM=none\n"
MACHINE = (
    "3,101,6000,-;Out of memory: Killed process 4242 (python3) total-vm:99999999kB, anon-rss:2097152kB, "
    "file-rss:1024kB, shmem-rss:0kB, UID:1000 pgtables:9kB oom_score_adj:0\n"
)
GROUP = (
    "3,102,7000,-;Memory cgroup out of memory: Killed process 77 (pt_data_worker) total-vm:9kB, anon-rss:1048576kB, "
    "file-rss:0kB, shmem-rss:524288kB, UID:0 pgtables:9kB oom_score_adj:0\n"
)
# Linux 4.
SHORT = "3,103,8000,-;Killed process 9 (python) total-vm:9kB, anon-rss:1024kB, file-rss:0kB\n"


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "dev" / "kmsg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return kernel_log(tmp_path)

    return write


def test_the_processes_that_were_killed(log):
    found = log(OLD + MACHINE + GROUP + SHORT)
    assert found.last == 103
    assert found.killed == (
        Killed(number=101, pid=4242, name="python3", rss_gib=2097152 / 2**20 + 1024 / 2**20),
        Killed(number=102, pid=77, name="pt_data_worker", rss_gib=1.5),
        Killed(number=103, pid=9, name="python", rss_gib=1024 / 2**20),
    )
    assert found.killed[0].words == "process 4242 (python3), which had 2.00 GiB"


def test_only_what_came_later(log):
    before = log(OLD + MACHINE)
    assert [killed.pid for killed in log(OLD + MACHINE + GROUP).since(before)] == [77]
    assert log(OLD + MACHINE).since(before) == ()
    # Without a log at the beginning, nobody knows what is new.
    assert log(OLD + MACHINE).since(None) == ()


@pytest.mark.parametrize(
    "line",
    [
        # A program wrote it: facility 1.
        MACHINE.replace("3,101", "11,101"),
        "3,101,6000,-;Out of memory: Killed process x (python) total-vm:9kB\n",
        "3,101,6000,-;Killed process 99999999999999999999 (python) total-vm:9kB\n",
        # A second line of a record is not a record.
        OLD + " Killed process 9 (python) total-vm:9kB, anon-rss:1024kB\n",
        "3,101\n",
        b"\xff\xfe\x00" * 1000,
    ],
)
def test_what_the_kernel_has_not_said_is_refused(log, line):
    assert log(line).killed == ()


def test_a_name_that_somebody_chose(log):
    (killed,) = log(MACHINE.replace("(python3)", "(\x1b[31m) is; 'x)")).killed
    assert killed.name == "??31m??is???x"
    (killed,) = log(MACHINE.replace("(python3)", "(anon-rss:9999kB)")).killed
    assert (killed.name, killed.words[-8:]) == ("anon-rss?9999kB", "2.00 GiB")


def test_no_log(tmp_path, log):
    assert kernel_log(tmp_path) is None
    assert log("") is None
    (tmp_path / "dev" / "kmsg").unlink()
    (tmp_path / "dev" / "kmsg").mkdir()
    assert kernel_log(tmp_path) is None


def test_nobody_waits_for_another_record(tmp_path):
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev" / "kmsg")
    writer = os.open(tmp_path / "dev" / "kmsg", os.O_RDWR)
    os.write(writer, MACHINE.encode())
    read = []
    thread = threading.Thread(target=lambda: read.append(kernel_log(tmp_path)), daemon=True)
    thread.start()
    thread.join(30)
    os.close(writer)
    assert [killed.pid for killed in read[0].killed] == [4242]

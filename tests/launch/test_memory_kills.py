"""The kernel's counters of processes that it has killed for want of memory."""

import pytest

from titanlab.launch.memory_kills import MemoryKills, memory_kills
from titanlab.records.outcome import KillEvidence

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


LINE = "3,{},6000,-;Out of memory: Killed process {} (python3) total-vm:9kB, anon-rss:3145728kB, file-rss:0kB\n"


@pytest.fixture
def first_namespace(tmp_path):
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")


def test_the_kernels_log_names_the_process(root, first_namespace):
    place = root("proc/vmstat", "oom_kill 4\n")
    root("dev/kmsg", LINE.format(7, 50))
    before = memory_kills(place)
    # An older record of the same number is another process's.
    assert before.evidence(place, pids=[50]) == NOBODY
    root("dev/kmsg", LINE.format(7, 50) + LINE.format(8, 51))
    root("proc/vmstat", "oom_kill 5\n")
    words = "the kernel has killed it for want of memory, says its log: process 51 (python3), which had 3.00 GiB"
    assert before.evidence(place, pids=[50, 51]) == KillEvidence(by_kernel=True, words=words)


def test_in_a_container_the_log_only_adds_to_the_counter(root):
    place = root("proc/vmstat", "oom_kill 4\n")
    root("dev/kmsg", "6,1,5000,-;Linux\n")
    before = memory_kills(place)
    root("dev/kmsg", LINE.format(8, 51))
    # The number is the host's, and the process with this number here may be another one.
    assert before.evidence(place, pids=[51]) == NOBODY
    root("proc/vmstat", "oom_kill 5\n")
    words = "the kernel has killed a process of this machine for want of memory; its log names process 51 (python3), "
    assert before.evidence(place, pids=[51]) == KillEvidence(by_kernel=True, words=f"{words}which had 3.00 GiB")


def test_the_log_alone_is_evidence(root, first_namespace, tmp_path):
    root("dev/kmsg", "6,1,5000,-;Linux\n")
    before = memory_kills(tmp_path)
    assert before.evidence(tmp_path, pids=[51]) is None
    root("dev/kmsg", LINE.format(8, 51))
    assert before.evidence(tmp_path, pids=[51]).by_kernel
    assert before.evidence(tmp_path, pids=[52]) is None

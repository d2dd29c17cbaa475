"""The kernel's counters of processes that it has killed for want of memory."""

import pytest

from titanlab.launch import memory_kills
from titanlab.launch.evidence import MemoryKills
from titanlab.records import KillEvidence

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

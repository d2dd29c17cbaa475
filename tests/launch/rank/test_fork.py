"""The ranks of a host, forked from one process: each with its own environment, log, session and name; ended together.

The launcher is the real one. A script stands in the place of the worker, so that torch is not imported.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.launch.command import alive
from tests.until import until
from titanlab.distributed import held_signals
from titanlab.launch import processes as escalation
from titanlab.launch import processes as local
from titanlab.launch.rank.fork import adopting
from titanlab.records import OutcomeKind, RunFolder
from titanlab.system import process_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot adopt another's children")


def worker(folder, script, prepare="pass", *, handles_stops=True):
    """A command that runs `prepare` before the fork, and a script with `rank` and `folder` in each rank."""
    lines = [
        "import json, os, signal, sys, time",
        "from pathlib import Path",
        "from titanlab.launch.rank.fork import end_with_parent, fork_ranks, hear_stop_signals",
        f"folder = Path({str(folder)!r})",
        "def prepare():",
        textwrap.indent(textwrap.dedent(prepare), "    "),
        "shared = fork_ranks(folder / 'logs', prepare)",
        "end_with_parent()",
        "hear_stop_signals()" if handles_stops else "",
        "rank = int(os.environ['RANK'])",
        textwrap.dedent(script),
    ]
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Starts ranks that run a script, and returns those that failed."""

    def start(world, script, prepare="pass", **how):
        monkeypatch.setattr(local, "worker_command", lambda folder: worker(tmp_path, script, prepare, **how))
        (tmp_path / "logs").mkdir(exist_ok=True)
        # As the caller of a launcher does.
        with held_signals():
            return local.start(RunFolder(tmp_path), local.of_this_host(world), attempt=7)

    return start


def test_each_rank_has_what_a_process_of_its_own_would_have(forked, tmp_path):
    script = """
        seen = {name: os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TITANLAB_LOG")}
        seen["session"] = os.getsid(0) == os.getpid()
        seen["parent"] = os.getppid()
        seen["name"] = Path("/proc/self/comm").read_text().strip()
        seen["pipes"] = [number for number in range(3, 100) if os.path.exists(f"/proc/self/fd/{number}")
                         and "pipe" in os.readlink(f"/proc/self/fd/{number}")]
        seen["attempt"] = os.environ["TITANLAB_ATTEMPT"]
        (folder / f"rank-{rank}").write_text(json.dumps(seen))
    """
    assert forked(3, script) == {}
    for rank in range(3):
        seen = json.loads((tmp_path / f"rank-{rank}").read_text())
        assert seen == {
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "TITANLAB_LOG": str(tmp_path / "logs" / f"rank-{rank}.log") if rank else None,
            "session": True,
            "parent": os.getpid(),
            "name": f"rank {rank}",
            "attempt": "7",
            # The file for process numbers is the forking process's.
            "pipes": [],
        }


@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
def test_the_end_of_a_forked_rank_is_its_own(forked, end, code):
    assert forked(3, f"{end} if rank == 1 else time.sleep(120)") == {1: code}


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_process_that_ends_before_it_has_forked_is_a_failure(forked, end):
    assert forked(2, "pass", end) in ({0: 3}, {0: -9})


def test_a_stop_signal_waits_until_the_rank_handles_it(forked, tmp_path):
    """A rank that has just been forked must not die of a signal that it would answer a moment later."""
    script = """
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        while not signal.sigpending():
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        hear_stop_signals()
        os._exit(4)
    """

    def send():
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert forked(2, script, handles_stops=False) == {}
    sender.join()


def test_the_launcher_adopts_nothing_afterwards(forked):
    """A process that adopts for good would have to wait for children of other programs."""
    assert forked(2, "pass") == {}
    # The intermediate process exits; its child is adopted by the first process of the system, or by another reaper.
    script = "import os, time; print(os.fork() or time.sleep(60) or '', flush=True)"
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", script], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]
    )
    os.close(write)
    with os.fdopen(read) as lines:
        grandchild = int(lines.readline())
    os.waitpid(pid, 0)
    assert str(os.getpid()) != Path(f"/proc/{grandchild}/stat").read_text().rsplit(")", 1)[1].split()[1]
    os.kill(grandchild, signal.SIGKILL)
    with adopting() as can:
        assert can


def test_a_stop_signal_before_the_fork_ends_the_start(forked, tmp_path):
    """Also if the process that forks is stopped (SIGSTOP): it is woken."""
    prepare = "(folder / 'prepares').touch(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)"

    def send():
        until(lambda: (tmp_path / "prepares").exists())
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    assert forked(2, '(folder / f"rank-{rank}").touch()', prepare) == {0: -signal.SIGTERM}
    sender.join()
    (note,) = RunFolder(tmp_path).failures(7)
    assert note.cause == "asked to end by SIGINT; the run can be resumed (before its ranks were started)"
    assert not list(tmp_path.glob("rank-*"))


def test_a_process_that_is_stopped_before_it_forks_hangs(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(escalation, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(escalation, "LEAST_LIMIT_SECONDS", 0.3)
    prepare = "(folder / 'pid').write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)"
    assert forked(2, '(folder / f"rank-{rank}").touch()', prepare) == {0: -signal.SIGKILL}
    (note,) = RunFolder(tmp_path).failures(7)
    assert note.cause == "a rank was stopped for 0.3 s: rank 0 does not answer: its process is stopped (SIGSTOP)"
    assert not alive(int(read(tmp_path / "pid")))
    assert not list(tmp_path.glob("rank-*"))


def test_a_rank_that_stays_stopped_is_killed_with_the_others_after_a_stop_signal(forked, tmp_path, monkeypatch):
    monkeypatch.setattr(escalation, "STOPPED_SECONDS", 0.2)
    script = """
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        stop = lambda number, frame: os.kill(os.getpid(), signal.SIGSTOP) if rank else None
        signal.signal(signal.SIGCONT, stop)
        signal.signal(signal.SIGTERM, stop)
        (folder / f"ready-{rank}").touch()
        while True:
            time.sleep(0.01)
    """

    def send():
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    assert forked(2, script) == dict.fromkeys(range(2), -signal.SIGKILL)
    sender.join()
    (note,) = RunFolder(tmp_path).failures(7)
    assert (note.rank, note.kind) == (1, OutcomeKind.PREEMPTED)
    assert "rank 1 did not end (its process is stopped (SIGSTOP)), so all ranks were killed" in note.cause


# The launcher as a process of its own, which is killed.
LAUNCHER = """
    import json, sys
    from pathlib import Path
    from titanlab.launch import processes as local
    from titanlab.records import RunFolder
    local.worker_command = lambda folder: json.loads(sys.argv[2])
    local.start(RunFolder(Path(sys.argv[1])), local.of_this_host(2), attempt=1)
"""


def test_stopped_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    """As those that are not stopped: they are woken, so that they can save."""
    script = """
        (folder / f"rank-{rank}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        (folder / f"woken-{rank}").touch()
    """

    def are_stopped():
        pids = [*filter(None, map(read, tmp_path.glob("rank-*")))]
        return len(pids) == 2 and all(process_state(int(pid)) == "T" for pid in pids)

    killed(tmp_path, worker(tmp_path, script), are_stopped)
    until(lambda: len(list(tmp_path.glob("woken-*"))) == 2)


def test_ranks_of_a_launcher_that_is_killed_before_the_fork_do_not_begin(tmp_path):
    prepare = """
        launcher = os.getppid()
        (folder / "forking").write_text(str(os.getpid()))
        while os.getppid() == launcher:
            time.sleep(0.01)
    """
    killed(tmp_path, worker(tmp_path, '(folder / f"rank-{rank}").touch()', prepare), lambda: read(tmp_path / "forking"))
    until(lambda: not alive(int(read(tmp_path / "forking"))))
    assert not list(tmp_path.glob("rank-*"))


def killed(folder, command, when):
    """Start a launcher, and kill it."""
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(LAUNCHER), str(folder), json.dumps(command)])
    until(when)
    launcher.kill()
    launcher.wait()


def read(path):
    return path.read_text() if path.exists() else ""


def test_an_error_in_a_forked_child_ends_it_before_it_runs_its_parents_code():
    script = """
        import os
        from pathlib import Path
        from titanlab.distributed import ALONE
        from titanlab.launch.rank import fork

        def fails(option, value):
            raise OSError

        fork._prctl = fails
        try:
            pids = fork.fork_children(ALONE, Path(), lambda: 0)
        except OSError:
            print("the child is in its parent's code")
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
    """
    assert subprocess.check_output([sys.executable, "-c", textwrap.dedent(script)], text=True) == "1\n"

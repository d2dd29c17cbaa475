"""What a killed process has compiled reaches no other run; what a run has compiled until its clean end does."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from tests.until import until
from titanlab.data.cache import root
from titanlab.techniques.compile import cache


@pytest.fixture
def kept(tmp_path):
    """A cache with one library and one kernel of Triton's."""
    for name in ("ab/c.so", "triton/0/k/k.json", "locks/c.lock"):
        file = tmp_path / "cache" / name
        file.parent.mkdir(parents=True)
        file.write_text("old")
    return tmp_path / "cache"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


OLD = ["ab/c.so", "attempts/.begin", "locks/c.lock", "triton/0/k/k.json"]


def test_an_attempt_starts_with_the_cache_and_adds_to_it(kept):
    with cache.attempt_folder(kept, "run-1") as folder:
        assert os.environ[cache.VARIABLE] == str(folder)
        assert names(folder) == ["ab/c.so"]
        for new in ("cd/new.so", "locks/new.lock", "triton/0/new/k.json"):
            (folder / new).parent.mkdir(parents=True)
            (folder / new).write_text("new")
        assert not (kept / "cd").exists()
        cache.publish(folder)
    assert os.environ[cache.VARIABLE] != str(folder)
    assert names(kept) == sorted([*OLD, "cd/new.so"])


def test_a_file_that_another_attempt_has_published_stays(kept):
    with cache.attempt_folder(kept, "run-1") as first, cache.attempt_folder(kept, "run-2") as second:
        for folder in (first, second):
            (folder / "ab" / "both.so").write_text(folder.name)
            cache.publish(folder)
    assert (kept / "ab" / "both.so").read_text() == "run-1"
    assert names(kept) == sorted([*OLD, "ab/both.so"])


RANK = """
import pathlib, sys
from titanlab.techniques.compile import cache
with cache.attempt_folder(pathlib.Path(sys.argv[1]), sys.argv[2]) as folder:
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_ranks_share_the_folder_and_the_last_one_removes_it(kept):
    command = [sys.executable, "-c", RANK, str(kept), "run-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        there = other.stdout.readline().strip()
        with cache.attempt_folder(kept, "run-1") as folder:
            assert str(folder) == there
            (folder / "ab" / "mine.so").write_text("whole")
        # The other rank still uses it.
        assert (folder / "ab" / "mine.so").exists()
        other.communicate("\n")
    assert names(kept) == OLD


@pytest.mark.parametrize("name", ["run-1", "run-2"])
def test_the_folder_of_killed_ranks_goes_before_another_attempt_starts(kept, name):
    command = [sys.executable, "-c", RANK, str(kept), "run-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        (kept / "attempts" / "run-1" / "ab" / "half.so").write_text("")
        other.kill()
        other.wait()
    with cache.attempt_folder(kept, name) as folder:
        assert names(folder) == ["ab/c.so"]
        assert {path.name for path in folder.parent.iterdir()} == {".begin", name, f"{name}.lock"}


def test_a_file_system_without_locks_is_an_error(kept, monkeypatch):
    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks"), cache.attempt_folder(kept, "run-1"):
        pass


def test_the_folder_is_the_users_own(tmp_path, monkeypatch):
    """What is in it is executed: one that others can write to is not used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "home"))
    own = tmp_path / f"titanlab-{os.getuid()}"
    assert cache.default_folder(root) == own / "inductor"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)
    assert cache.default_folder(root) == own / "inductor"
    # Under a umask of 002 torch makes folders in it that a group can write to.
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    assert cache.default_folder(root) == tmp_path / "home" / "inductor"
    assert stat.S_IMODE((tmp_path / "home" / "inductor").stat().st_mode) == 0o700
    own.rmdir()
    (tmp_path / "elsewhere").mkdir()
    own.symlink_to(tmp_path / "elsewhere")
    assert cache.default_folder(root) == tmp_path / "home" / "inductor"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "file"))
    made = cache.default_folder(root)
    assert made.parent == tmp_path
    assert made.name.startswith("titanlab-compile-")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


# As a linker that is killed: its output is there, and empty. The next time it is the compiler.
COMPILER = """#!/bin/sh
case "$*" in *.main.so*)
    if mkdir "{folder}/once" 2>/dev/null; then
        : > "$(echo "$*" | sed 's/.* -o *\\([^ ]*\\.main\\.so\\).*/\\1/')"
        echo $PPID > "{folder}/rank.new"
        mv "{folder}/rank.new" "{folder}/rank"
        exec sleep 600
    fi;;
esac
exec g++ "$@"
"""


@pytest.mark.full
def test_a_run_that_is_killed_while_it_compiles_does_not_keep_the_next_from_training(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TMPDIR": str(tmp_path)}
    for name in (cache.VARIABLE, *cache.ENVIRONMENT):
        del environment[name]
    words = (
        "model=debug world=1 data=synthetic compile=block_no_loss training.steps=2 optimizer.schedule.warmup_steps=1"
    )
    train = [sys.executable, "-m", "titanlab", "train", *words.split(), f"runs={tmp_path}/runs"]
    with subprocess.Popen(train, env=environment, cwd=tmp_path) as first:
        until((tmp_path / "rank").exists, 120.0)
        os.kill(int((tmp_path / "rank").read_text()), signal.SIGKILL)
        assert first.wait() != 0
    kept = tmp_path / f"titanlab-{os.getuid()}" / "inductor"
    assert not list(kept.glob("??/*"))
    assert [path.stat().st_size for path in kept.glob("attempts/*/??/*.main.so")].count(0) == 1
    second = subprocess.run(train, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "file too short" not in second.stdout + second.stderr
    libraries = list(kept.glob("??/*.main.so"))
    assert libraries
    assert all(path.stat().st_size for path in libraries)
    # The folders of both attempts are gone.
    assert [path.name for path in (kept / "attempts").iterdir()] == [".begin"]
    # Nor does torch make its default folder, whose name everybody knows.
    assert not list(tmp_path.glob("torchinductor_*"))

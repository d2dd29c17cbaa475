"""What a killed compiler leaves in inductor's cache is removed; what another process is writing is not."""

from __future__ import annotations

import getpass
import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from tests.until import until
from titanlab.compile import cache
from titanlab.data.cache import root

KEY = "cabc"


@pytest.fixture
def folder(tmp_path):
    """An empty cache folder."""
    tmp_path.chmod(0o700)
    for made in (tmp_path / "cache" / "locks", tmp_path / "cache" / "ab"):
        made.mkdir(parents=True)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The bytes of a library and of an object, from a real compiler."""
    there = tmp_path_factory.mktemp("library")
    (there / "a.cpp").write_text("int f() { return 1; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "a.cpp", "-o", "a.so"], cwd=there, check=True)
    subprocess.run(["g++", "-c", "a.cpp", "-o", "a.o"], cwd=there, check=True)
    return {".so": (there / "a.so").read_bytes(), ".o": (there / "a.o").read_bytes()}


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_whole_files_stay_and_parts_of_them_go(folder, library, suffix):
    whole = library[suffix]
    kept = folder / "ab" / f"c0.main{suffix}"
    kept.write_bytes(whole)
    parts = []
    for number, content in enumerate((b"", whole[:3], whole[:64], whole[: len(whole) // 2], whole[:-1], b"\0" * 5000)):
        parts.append(folder / "ab" / f"c{number + 1}.main{suffix}")
        parts[-1].write_bytes(content)
    assert sorted(cache.repair(folder)) == parts
    assert kept.read_bytes() == whole
    assert not any(part.exists() for part in parts)


def test_all_that_a_killed_compiler_was_about_to_write_goes(folder, library):
    """Its folder stays behind, and says so of files that look whole."""
    (folder / "ab" / f"{KEY}.main.so").write_bytes(library[".so"])
    (folder / "ab" / f"{KEY}.main.cpp").write_text("int f();")
    (folder / "ab" / f"{KEY}.main_CxxBuild").mkdir()
    assert cache.repair(folder) == [folder / "ab" / f"{KEY}.main_CxxBuild"]
    assert sorted(path.name for path in (folder / "ab").iterdir()) == [f"{KEY}.main.cpp"]
    assert cache.repair(folder) == []


@pytest.mark.parametrize("shape", ["link", "open", "open parent", "another's"])
def test_a_folder_that_another_user_could_have_made_is_left_alone(folder, monkeypatch, shape):
    """Whoever makes a folder first under a name that can be guessed would choose which files are deleted."""
    (folder / "ab" / "c.so").write_bytes(b"")
    target = folder
    if shape == "link":
        target = folder.with_name("link")
        target.symlink_to(folder)
    elif shape.startswith("open"):
        folder.parent.chmod(0o755)
        folder.chmod(0o770 if shape == "open" else 0o755)
    else:
        monkeypatch.setattr(cache.os, "getuid", lambda: os.geteuid() + 1)
    assert cache.repair(target) == []
    assert (folder / "ab" / "c.so").exists()


def test_torchs_own_folder_is_neither_used_nor_cleaned(folder, monkeypatch):
    """Everybody knows its name: it may be another user's, or a link to a folder of this user."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    mine = folder.parent / "mine"
    (mine / "precompiled_headers" / "notes_CxxBuild").mkdir(parents=True)
    (mine / "precompiled_headers" / "__init__.py").write_text("")
    (folder.parent / f"torchinductor_{getpass.getuser()}").symlink_to(mine)
    assert cache.repair(folder) == []
    assert {path.name for path in (mine / "precompiled_headers").iterdir()} == {"notes_CxxBuild", "__init__.py"}
    assert cache.ENVIRONMENT == {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


@pytest.mark.parametrize("name", [f"{KEY}.main", f"{KEY}.optimized", KEY])
def test_what_another_process_is_writing_stays_until_it_has_died(folder, name):
    """A part that is called `optimized` is written under the lock of another name."""
    lock = folder / "locks" / f"{'other' if 'optimized' in name else KEY}.lock"
    code = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, 2); print(flush=True); input()"
    (folder / "ab" / f"{name}.so").write_bytes(b"")
    (folder / "ab" / f"{name}_CxxBuild").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        writer.stdout.readline()
        assert cache.repair(folder) == []
        assert (folder / "ab" / f"{name}.so").exists()
        writer.kill()
    assert cache.repair(folder)
    assert list((folder / "ab").iterdir()) == []


def test_empty_files_after_a_power_cut(folder):
    (folder / "ab" / "c1.py").write_text("")
    (folder / "ab" / "c2.py").write_text("x = 1")
    # torch's own locks are empty, and a file under a name with a dot is being written.
    (folder / "locks" / "c1.lock").write_text("")
    (folder / "ab" / ".12.34.tmp").write_text("")
    for kernel, content in (("broken", ""), ("good", "{}")):
        (folder / "triton" / "0" / kernel).mkdir(parents=True)
        (folder / "triton" / "0" / kernel / "k.json").write_text(content)
        (folder / "triton" / "0" / kernel / "k.cubin").write_text("binary")
    assert cache.repair(folder) == [folder / "ab" / "c1.py", folder / "triton" / "0" / "broken"]
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        *("c2.py", "c1.lock", ".12.34.tmp", ".titanlab-repair.lock", "k.json", "k.cubin")
    }


def test_nothing_there_is_nothing_to_repair(tmp_path):
    assert cache.repair(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


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
    words = [
        "model=debug",
        "world=1",
        "data=synthetic",
        "compile=block_no_loss",
        "training.steps=2",
        f"runs={tmp_path}/runs",
    ]
    train = [sys.executable, "-m", "titanlab", "train", *words, "optimizer.schedule.warmup_steps=1"]
    with subprocess.Popen(train, env=environment, cwd=tmp_path) as first:
        until((tmp_path / "rank").exists, 120.0)
        os.kill(int((tmp_path / "rank").read_text()), signal.SIGKILL)
        assert first.wait() != 0
    libraries = list((tmp_path / f"titanlab-{os.getuid()}").glob("inductor/??/*.main.so"))
    assert [path.stat().st_size for path in libraries].count(0) == 1
    second = subprocess.run(train, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "file too short" not in second.stdout + second.stderr
    assert all(path.stat().st_size for path in libraries)
    # Nor does torch make its default folder, whose name everybody knows.
    assert not list(tmp_path.glob("torchinductor_*"))

"""launch/dev-slurm: what it refuses, that it leaves nothing behind, and what its installation says where it cannot."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent.parent / "launch" / "dev-slurm"


@pytest.fixture
def folder():
    # Sockets have short names: pytest's own folders are too deep.
    made = Path(tempfile.mkdtemp(prefix="dev-slurm-", dir="/tmp"))
    yield made
    tool("stop", made)
    shutil.rmtree(made)


def tool(*arguments):
    command = [sys.executable, HERE / "dev-slurm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def marked(folder):
    """Processes that have the folder in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "environ").read_bytes():
                found.append((entry / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.slurm
def test_it_starts_runs_a_job_and_stops_without_a_trace(folder):
    code, out, err = tool("start", folder)
    assert (code, err) == (0, "")
    assert f"Slurm runs in {folder}" in out
    assert tool("env", folder) == (0, f"export SLURM_CONF={folder / 'slurm.conf'}\n", "")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    job = [
        "sbatch",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=4",
        "--output=/dev/null",
        "--wrap=srun sleep 99",
    ]
    subprocess.run(job, env=environment, check=True, capture_output=True)
    until = time.monotonic() + 120
    while marked(folder).count("sleep") < 32:
        assert time.monotonic() < until, marked(folder)
        time.sleep(0.2)
    code, out, _ = tool("status", folder)
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= {"munged", "mariadbd", "slurmdbd", "slurmctld", "n1", "n4"}
    assert tool("start", folder)[0] == 1
    code, out, err = tool("stop", folder)
    assert (code, err) == (0, "")
    assert "slurmctld" in out
    assert marked(folder) == []
    assert tool("status", folder)[0] == 1
    # The logs stay.
    assert (folder / "log" / "slurmctld.log").stat().st_size > 0


@pytest.mark.slurm
def test_a_folder_with_something_else_in_it_stays_as_it_is(folder):
    (folder / "mine").touch()
    code, out, err = tool("start", folder)
    assert (code, out) == (1, "")
    assert err == f"dev-slurm: {folder} is not empty, and holds no dev-slurm; name another folder\n"
    assert os.listdir(folder) == ["mine"]


def test_without_a_verb_it_says_which_there_are():
    code, out, err = tool()
    assert (code, out) == (2, "")
    assert all(verb in err for verb in ("start", "env", "status", "stop"))


def test_what_cannot_be_installed_is_named_in_one_line(tmp_path):
    def install():
        shell, environment = shutil.which("bash"), {"PATH": str(tmp_path)}
        done = subprocess.run([shell, HERE / "install"], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        return done.stderr

    assert "sbatch" in install()
    assert "no apt-get here" in install()
    for name, text in {"apt-get": "exit 1", "id": "echo 1000"}.items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert "as root: apt-get install --no-install-recommends slurmctld" in install()


def test_a_link_in_a_folder_for_all_is_refused(tmp_path):
    """The name that is taken where none is given can be guessed: whoever makes it first would choose Slurm's settings."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for verb in ("start", "env", "status", "stop"):
        code, out, err = tool(verb, tmp_path / "link")
        assert (code, out) == (1, "")
        assert err == f"dev-slurm: {tmp_path / 'link'} is a link, or another user's; name another folder\n"
    assert not list((tmp_path / "mine").iterdir())

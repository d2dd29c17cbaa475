"""The batch file, and the call of sbatch; sbatch is a script that keeps what it gets."""

import errno
import os
import re
import shlex
import subprocess

import pytest

from tests.launch.slurm.printed import LONG_AGO
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, Submission, write_submission
from titanlab.launch.evidence import note_bad_host
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import batch
from titanlab.recipe import Loader, read_flags
from titanlab.records import Outcome, OutcomeKind, RunFolder

ONE = JobShape(processes=1, tasks_per_node=1)
LARGE = JobShape(processes=8, nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_node=4, memory_gib=64.0, minutes=90)
TAKES_IT = "echo 'Submitted batch job 123'"


@pytest.fixture
def sweep(tmp_path):
    """A sweep's folder."""
    folder = tmp_path / "runs" / "layouts"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """`sbatch("exit 1")`: commands of Slurm that are first on PATH; sbatch keeps its batch file and its environment."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def write(script=TAKES_IT):
        for name, text in {"sbatch": f'cp "$1" {tmp_path}/file; env > {tmp_path}/env; {script}', "srun": ""}.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)

    write()
    return write


@pytest.fixture
def submitted(sbatch, sweep, tmp_path):
    """`submitted(Slurm(), LARGE)`: the lines of the batch file with which jobs of this shape are submitted."""

    def submit(config, shape=ONE, runs=("one",)):
        job = {"token": "aa", "launcher": "slurm", "created": LONG_AGO, "code": "code/1", "launch": {}}
        submission = Submission(shape=shape, runs=runs, **job)
        write_submission(sweep, submission)
        assert batch.submit(config, sweep, submission) == "123"
        return (tmp_path / "file").read_text().splitlines()

    return submit


def flags(lines):
    """The flags of sbatch, without those of the logs."""
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH") and "log" not in line} - {
        "open-mode=append"
    }


def setup(lines):
    """The lines that the shell runs before the command."""
    return lines[lines.index("# setup") + 1 : lines.index("# command") - 1]


def srun(lines):
    """The words of the command that starts the ranks."""
    (command,) = [line for line in lines if line.startswith("srun ")]
    return shlex.split(command)


# What the batch file says


def test_keys_that_are_null_leave_the_choice_to_the_site(submitted, sweep):
    lines = submitted(Slurm())
    assert flags(lines) == {
        *("array=0-0%1", "job-name=layouts/one-aa", "nodes=1", "ntasks-per-node=1", "requeue", "signal=USR2@120")
    }
    assert setup(lines) == [f"export PYTHONPATH={sweep}/code/1${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"]
    assert {"--export=ALL", "--kill-on-bad-exit=0", "--wait=600"} <= set(srun(lines))


NAMES = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
EXTRA = {"reservation": "mine", "exclusive": True, "nice": 0, "comment": None, "hold": False, "gres": "gpu:4,nvme:1"}


@pytest.mark.parametrize(
    ("config", "shape", "there", "absent"),
    [
        (
            {**{name: f"a-{name}" for name in NAMES}, "array_parallelism": 1, "signal_seconds": 60, "gpu_type": "h100"},
            LARGE,
            [
                *(f"{name}=a-{name}" for name in NAMES),
                *("array=0-1%1", "signal=USR2@60", "job-name=layouts-aa", "nodes=2", "ntasks-per-node=4"),
                *("cpus-per-task=3", "gpus-per-node=h100:4", "mem=64G", "time=90"),
            ],
            ["gres", "no-kill"],
        ),
        ({}, LARGE, ["gpus-per-node=4", "array=0-1%2"], ["wckey"]),
        ({"ask_for_gpus": False, "gpu_type": "h100"}, LARGE, [], ["gpus-per-node", "gres"]),
        ({"gpu_type": "h100"}, ONE, [], ["gpus-per-node", "gres"]),
        ({"gpu_flag": "gres", "gpu_type": "h100"}, LARGE, ["gres=gpu:h100:4"], ["gpus-per-node"]),
        ({"gpu_flag": "gres", "ask_for_gpus": False}, LARGE, [], ["gres"]),
        # What launch.extra says wins. 0 equals False in Python, and is a value.
        (
            {"gpu_flag": "gres", "extra": EXTRA, "requeue": False},
            LARGE,
            ["gres=gpu:4,nvme:1", "reservation=mine", "exclusive", "nice=0", "no-requeue"],
            ["comment", "hold", "requeue"],
        ),
        # Only a job of several nodes survives the loss of one.
        ({"restarts": 1, "min_world": 1}, LARGE, ["no-kill"], []),
        ({"restarts": 1, "min_world": 1}, ONE, [], ["no-kill"]),
        *(
            ({}, JobShape(processes=1, tasks_per_node=1, memory_gib=gib), [f"mem={word}"], [])
            for gib, word in ((0.0, "0"), (64, "64G"), (3.5, "3584M"), (0.5, "512M"))
        ),
    ],
)
def test_keys_that_are_given_are_flags(submitted, config, shape, there, absent):
    lines = submitted(Slurm(**config), shape, ("one", "two"))
    found = flags(lines)
    assert set(there) <= found
    assert not {flag.partition("=")[0] for flag in found} & set(absent)
    survives = "no-kill" in found
    assert ("--no-kill" in srun(lines)) is survives
    assert any(line.startswith("export SLURM_NTASKS=") for line in setup(lines)) is survives
    assert ("--cpus-per-task=3" in srun(lines)) is (shape is LARGE)


@pytest.mark.parametrize(
    ("preamble", "code", "said"),
    [
        (["true", "false || true", "if false; then", "  false", "fi"], 0, "trains"),
        (["load() { return 3; }", "load 'a b'"], 3, "error: launch.preamble: exit code 3 of: load 'a b'"),
        (
            ["if true; then", "  nothing_here 2>/dev/null", "fi"],
            127,
            "error: launch.preamble: exit code 127 of:   nothing_h",
        ),
        # Files of others are full of tests that fail.
        (["source ./others.sh"], 0, "trains"),
        (["source ./none.sh 2>/dev/null"], 1, "error: launch.preamble: exit code 1 of: source ./none.sh"),
    ],
)
def test_a_line_of_the_preamble_that_fails_ends_the_job(submitted, sweep, preamble, code, said):
    (sweep / "others.sh").write_text("false\ngrep -q x /dev/null\ntrue\n")
    lines = setup(submitted(Slurm(preamble=preamble)))
    (sweep / "job.sh").write_text("\n".join([*lines, "false", "echo trains"]))
    done = subprocess.run(["bash", "job.sh"], cwd=sweep, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).strip().splitlines()[-1].startswith(said)


def test_the_command_is_quoted_and_runs_in_the_container(submitted, sweep):
    lines = submitted(Slurm(container=["apptainer", "exec", "my image.sif"], python="/opt/a b/python"))
    words = ["apptainer", "exec", "my image.sif", "/opt/a b/python", "-P", "-m", "titanlab.launch.task"]
    assert srun(lines)[-9:] == [*words, str(sweep), "aa"]
    # The image may lack Slurm's commands: the shell of the batch file asks in its place.
    for asks in (lines, submitted(Slurm(srun_arguments=["--container-image=x"]))):
        assert f'export TITANLAB_SCONTROL={sweep}/jobs/."$SLURM_JOB_ID"' in asks


def test_the_batch_file_has_texts_as_typed(submitted, tmp_path):
    folder = tmp_path / "conf" / "launch"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(
        "defaults: [slurm_schema, _self_]\n"
        "partition: 017\npreamble: [module load cuda, ulimit -c 0]\nsrun_arguments: [--mpi=none, 1_0]\n"
        "extra: {time-min: 12:00:00, deadline: 1:30, gres-flags: off, exclusive: true}\n"
        "environment: {A: off, B: 017, C: true, D: \"it's $HOME\", E: ''}\n"
    )
    given = read_flags([f"--config-dir={folder.parent}", "launch=site", "+launch.extra.mem=1e3", "launch.qos=5e2"])
    lines = submitted(Loader(given, given.overrides).recipe().launch)
    heads = ["time-min=12:00:00", "deadline=1:30", "gres-flags=off", "exclusive", "mem=1e3", "partition=017", "qos=5e2"]
    assert set(heads) <= flags(lines)
    # The preamble comes before variables, and these are quoted.
    assert setup(lines)[1:9] == [
        *("module load cuda", "ulimit -c 0", "trap - ERR", "export A=off", "export B=017", "export C=true"),
        *("export D='it'\"'\"'s $HOME'", "export E=''"),
    ]
    assert "--mpi=none 1_0" in " ".join(srun(lines))


# The call of sbatch


def test_an_intent_that_is_gone_is_not_submitted(sbatch, sweep, tmp_path):
    job = {"token": "aa", "launcher": "slurm", "code": "code/1", "launch": {}, "shape": ONE, "runs": ("one",)}
    with pytest.raises(ConfigError, match="launch=slurm: sbatch says: "):
        batch.submit(Slurm(), sweep, Submission(**job))
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(("error", "held"), [(None, True), (errno.EWOULDBLOCK, True), (errno.ENOSYS, False)])
def test_sbatch_is_called_under_a_lock_where_there_are_locks(submitted, tmp_path, monkeypatch, error, held):
    def flock(descriptor, how):
        if error is not None:
            raise OSError(error, "no")

    (tmp_path / "bin" / "flock").write_text(f'#!/bin/sh\ntouch {tmp_path}/locked; shift; exec "$@"\n')
    (tmp_path / "bin" / "flock").chmod(0o755)
    monkeypatch.setattr(batch.fcntl, "flock", flock)
    submitted(Slurm())
    assert (tmp_path / "locked").exists() is held


def test_variables_that_would_change_the_job_are_unset(submitted, monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    kept = [
        "SLURM_CONF",
        "SLURM_CLUSTERS",
        "SLURM_JWT",
        "SLURM_TIME_FORMAT",
        "SBATCH_QOS",
        "SBATCH_WCKEY",
        "MY_SLURM_X",
    ]
    for name in (*kept, "SLURM_JOB_ID", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "theirs")

    def reach(**config):
        submitted(Slurm(**config))
        return {
            line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines() if line.endswith("=theirs")
        }

    assert reach(account="mine") == set(kept)
    # A key of launch.extra wins over the shell as well.
    assert reach(account="mine", extra={"wckey": "mine"}) == set(kept) - {"SBATCH_WCKEY"}
    assert reach(account="mine", extra={"wckey": None}) == set(kept)


# Refusals


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "sbatch gave up"),
        ("it failed", "sbatch gave up"),
        ("sbatch: error: one.\nsbatch: two", "one; two"),
        ("\n".join(f"sbatch: error: {word}" for word in ("a", "b", "c", "d")), "b; c; d"),
        ("Traceback of slurm\nslurm_load error: no\nhint", "slurm_load error: no"),
        ("Error: no slurm\nsbatch: error: that is why", "that is why"),
    ],
)
def test_of_what_sbatch_says_its_own_last_lines_are_told(submitted, sbatch, capfd, text, rule):
    sbatch(f"printf '%s\\n' {shlex.quote(text)} >&2; exit 1")
    told = f"launch=slurm: sbatch says: {rule}; mend the keys of launch, and submit again"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        submitted(Slurm())
    assert capfd.readouterr() == ("", "")


def test_hosts_on_which_a_run_has_failed_are_left_out_and_named_where_that_is_refused(submitted, sbatch, sweep):
    """Other runs keep them: one rank that somebody kills must not take a host from everybody."""
    for host in ("n3", "n1"):
        note_bad_host(RunFolder(sweep / "one"), Outcome(kind=OutcomeKind.HANG, attempt=1, cause="x"), host)
    assert "exclude=n3,n1" in flags(submitted(Slurm(), runs=("one", "two")))
    assert not any(flag.startswith("exclude") for flag in flags(submitted(Slurm(), runs=("two",))))
    assert not any(flag.startswith("exclude") for flag in flags(submitted(Slurm(nodelist="n3"))))
    sbatch("echo 'sbatch: error: Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(ConfigError, match="left out were hosts on which these runs have failed: n3, n1; .*--clear n3`"):
        submitted(Slurm())

"""The batch file, and the call of sbatch; sbatch is a script that notes what it gets."""

import errno
import fcntl
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.launch.slurm.printed import LONG_AGO
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, Submission, write_submission
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import batch
from titanlab.recipe import Loader, read_flags

SLURM = Slurm()
ONE = JobShape(processes=1, tasks_per_node=1)
LARGE = JobShape(processes=8, nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_node=4, memory_gib=64.0, minutes=90)


def submission(shape=ONE, runs=("one",)):
    return Submission(token="aa", launcher="slurm", created=LONG_AGO, code="code/1", shape=shape, launch={}, runs=runs)


@pytest.fixture
def sweep(tmp_path):
    """A sweep's folder."""
    folder = tmp_path / "runs" / "layouts"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Writes an sbatch that is first on PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def write(script):
        path = programs / "sbatch"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def written(config, sweep, shape=ONE, runs=("one",)):
    """Flags of sbatch by name, lines of the shell before the call of srun, and the words of that call."""
    first, *lines, call = batch.batch_text(config, sweep, submission(shape, runs)).splitlines()
    assert first == "#!/bin/bash"
    flags = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    flags = {name: "".join(shlex.split(value)) if equals else True for name, equals, value in flags}
    return flags, [line for line in lines if not line.startswith("#SBATCH")], shlex.split(call)


# What the batch file says


def test_keys_that_are_null_leave_the_choice_to_the_site(sweep):
    log = f"{sweep}/jobs/%A_%a"
    assert written(SLURM, sweep) == (
        {
            "job-name": "layouts/one-aa",
            "array": "0-0%1",
            "nodes": "1",
            "ntasks-per-node": "1",
            "requeue": True,
            "output": f"{log}_0_log.out",
            "error": f"{log}_0_log.err",
            "open-mode": "append",
            "signal": "USR2@120",
        },
        [f"export PYTHONPATH={sweep}/code/1${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"],
        [
            *["srun", "--unbuffered", f"--output={log}_%t_log.out", f"--error={log}_%t_log.err"],
            *["--export=ALL", "--kill-on-bad-exit=0", "--wait=600"],
            *[sys.executable, "-P", "-m", "titanlab.launch.task", str(sweep), "aa"],
        ],
    )


def test_keys_that_are_given_are_flags(sweep):
    names = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
    config = Slurm(**{name: f"a-{name}" for name in names}, array_parallelism=3, signal_seconds=60, gpu_type="h100")
    given, _, call = written(config, sweep, LARGE, ("one", "two", "three", "four"))
    assert {name: given[name] for name in names} == {name: f"a-{name}" for name in names}
    assert (given["nodes"], given["ntasks-per-node"], given["cpus-per-task"]) == ("2", "4", "3")
    assert (given["gpus-per-node"], given["mem"], given["time"]) == ("h100:4", "64G", "90")
    assert (given["array"], given["signal"], given["job-name"]) == ("0-3%3", "USR2@60", "layouts-aa")
    assert "--cpus-per-task=3" in call


@pytest.mark.parametrize(
    ("config", "shape", "asked"),
    [
        ({}, LARGE, {"gpus-per-node": "4"}),
        ({"ask_for_gpus": False, "gpu_type": "h100"}, LARGE, {}),
        ({"gpu_type": "h100"}, ONE, {}),
        ({"gpu_flag": "gres", "gpu_type": "h100"}, LARGE, {"gres": "gpu:h100:4"}),
        ({"gpu_flag": "gres"}, LARGE, {"gres": "gpu:4"}),
        ({"gpu_flag": "gres"}, ONE, {}),
        ({"gpu_flag": "gres", "ask_for_gpus": False}, LARGE, {}),
        # The nodes may have other devices too.
        ({"gpu_flag": "gres", "extra": {"gres": "gpu:4,nvme:1"}}, LARGE, {"gres": "gpu:4,nvme:1"}),
    ],
)
def test_gpus_are_asked_for_as_the_site_manages_them(sweep, config, shape, asked):
    flags, _, _ = written(Slurm(**config), sweep, shape)
    assert {name: flags[name] for name in ("gpus-per-node", "gres") if name in flags} == asked


@pytest.mark.parametrize(
    ("gib", "word"), [(None, None), (0, "0"), (0.0, "0"), (64, "64G"), (64.0, "64G"), (3.5, "3584M"), (0.5, "512M")]
)
def test_memory_is_told_in_whole_units(sweep, gib, word):
    flags, _, _ = written(SLURM, sweep, JobShape(processes=1, tasks_per_node=1, memory_gib=gib))
    assert flags.get("mem") == word


@pytest.mark.parametrize(("shape", "survives"), [(LARGE, True), (ONE, False)])
def test_only_a_job_of_several_nodes_survives_the_loss_of_one(sweep, shape, survives):
    flags, lines, call = written(Slurm(restarts=1, min_world=1), sweep, shape)
    counts_tasks = any(line.startswith("export SLURM_NTASKS=") for line in lines)
    assert ("no-kill" in flags, "--no-kill" in call, counts_tasks) == (survives,) * 3
    assert "no-kill" not in written(SLURM, sweep, shape)[0]


def test_texts_are_written_as_typed(sweep, tmp_path):
    folder = tmp_path / "conf" / "launch"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(
        "defaults: [slurm_schema, _self_]\n"
        "partition: 017\npreamble: [ulimit -c 0]\nsrun_arguments: [--mpi=none, 1_0]\nrequeue: false\n"
        "extra: {time-min: 12:00:00, deadline: 1:30, gres-flags: off, exclusive: true, hold: false, nice: 0, a_b: null}\n"
        "container: [apptainer, exec, my image.sif]\npython: /opt/a b/python\n"
        "environment: {A: off, B: 017, C: true, D: it's $HOME, E: ''}\n"
    )
    read = read_flags([f"--config-dir={folder.parent}", "launch=site", "+launch.extra.mem=1e3", "launch.qos=5e2"])
    given, lines, call = written(Loader(read, read.overrides).recipe().launch, sweep)
    assert {
        "time-min": "12:00:00",
        "deadline": "1:30",
        "gres-flags": "off",
        "exclusive": True,
        "mem": "1e3",
        "partition": "017",
        "qos": "5e2",
        "no-requeue": True,
        "nice": "0",
    }.items() <= given.items()
    assert given.keys().isdisjoint(("hold", "a-b", "requeue"))
    exports = ["export A=off", "export B=017", "export C=true", "export D='it'\"'\"'s $HOME'", "export E=''"]
    assert lines[1:8] == ["ulimit -c 0", "trap - ERR", *exports]
    assert call[call.index("--mpi=none") :][:6] == [
        "--mpi=none",
        "1_0",
        "apptainer",
        "exec",
        "my image.sif",
        "/opt/a b/python",
    ]


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
def test_a_line_of_the_preamble_that_fails_ends_the_job(sweep, preamble, code, said):
    (sweep / "others.sh").write_text("false\ngrep -q x /dev/null\ntrue\n")
    (sweep / "job.sh").write_text("\n".join([*written(Slurm(preamble=preamble), sweep)[1], "false", "echo trains"]))
    done = subprocess.run(["bash", "job.sh"], cwd=sweep, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).strip().splitlines()[-1].startswith(said)


# The call of sbatch


def test_an_array_is_submitted_and_its_number_returned(sbatch, sweep, tmp_path):
    sbatch(f'cp "$1" {tmp_path}/file; echo "Submitted batch job 123"')
    given = submission(JobShape(processes=1, tasks_per_node=1, minutes=5), ("one", "two"))
    write_submission(sweep, given)
    assert batch.submit(SLURM, sweep, given) == "123"
    assert (tmp_path / "file").read_text() == batch.batch_text(SLURM, sweep, given)


def test_an_intent_that_is_gone_is_not_submitted(sbatch, sweep, tmp_path):
    sbatch(f"touch {tmp_path}/called; echo 'Submitted batch job 123'")
    with pytest.raises(ConfigError, match="launch=slurm: sbatch says: "):
        batch.submit(SLURM, sweep, submission())
    assert not (tmp_path / "called").exists()


def test_what_sbatch_says_against_it_is_the_error(sbatch, sweep, capfd):
    sbatch("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    given = submission()
    write_submission(sweep, given)
    told = "launch=slurm: sbatch says: Batch job submission failed: Invalid qos specification; mend the keys of launch"
    with pytest.raises(ConfigError, match=re.escape(told)):
        batch.submit(SLURM, sweep, given)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [None, errno.ENOSYS])
def test_sbatch_has_the_lock_where_there_are_locks(sbatch, sweep, monkeypatch, error):
    """Also after the death of the process that has called it."""
    usual = fcntl.flock

    def flock(file, how):
        if error is not None:
            raise OSError(error, "no")
        usual(file, how)

    monkeypatch.setattr(batch.fcntl, "flock", flock)
    sbatch(f"flock --nonblock {sweep}/.sbatch true; echo $? > {sweep}/code; echo Submitted batch job 123")
    write_submission(sweep, submission())
    assert batch.submit(SLURM, sweep, submission()) == "123"
    assert (sweep / "code").read_text() == ("1\n" if error is None else "0\n")


def test_variables_that_would_change_the_job_are_unset(sbatch, sweep, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SBATCH_QOS", "MY_SLURM_X"}
    for name in (*kept, "SLURM_JOB_ID", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_WCKEY", "MASTER_ADDR"):
        monkeypatch.setenv(name, "theirs")
    sbatch(f"env > {sweep}/env; echo Submitted batch job 123")
    write_submission(sweep, submission())
    # What `extra` sets wins over the shell as well.
    batch.submit(Slurm(account="mine", extra={"wckey": "mine"}), sweep, submission())
    lines = (sweep / "env").read_text().splitlines()
    assert {line.partition("=")[0] for line in lines if line.endswith("=theirs")} == kept
    batch.submit(Slurm(extra={"wckey": None}), sweep, submission())
    assert "SBATCH_WCKEY=theirs" in (sweep / "env").read_text().splitlines()


# Refusals


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "sbatch gave up"),
        ("it failed\n", "sbatch gave up"),
        ("sbatch: error: one.\nsbatch: two\n", "one; two"),
        ("".join(f"sbatch: error: {word}\n" for word in ("a", "b", "c", "d")), "b; c; d"),
        ("Traceback of slurm\nslurm_load error: no\nhint\n", "slurm_load error: no"),
        ("Error: no slurm\nsbatch: error: that is why\n", "that is why"),
    ],
)
def test_of_what_sbatch_says_its_own_last_lines_are_told(text, rule):
    told = f"launch=slurm: sbatch says: {rule}; mend the keys of launch, and submit again"
    assert str(batch._refused(text, [])) == told


def test_a_submission_without_enough_hosts_says_which_were_left_out():
    text = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    assert str(batch._refused(text, [])).endswith("is not available; mend the keys of launch, and submit again")
    said = str(batch._refused(text, ["n3", "n1"]))
    assert "left out were hosts on which these runs have failed: n3, n1" in said
    assert "`titanlab hosts --clear n3`" in said

"""The batch file, and the call of sbatch; sbatch is a script that notes what it gets."""

import errno
import os
import re
import shlex
import subprocess

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
    """Writes an sbatch that is first on PATH, with the srun without which submitit refuses a machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def write(script):
        path = programs / "sbatch"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def flags(config, sweep, shape=ONE, runs=("one",)):
    """The parameters that are not null."""
    parameters = batch._parameters(config, sweep, submission(shape, runs))
    return {name: value for name, value in parameters.items() if value is not None}


# What the batch file says


def test_keys_that_are_null_leave_the_choice_to_the_site(sweep):
    assert flags(SLURM, sweep) == {
        "job_name": "layouts/one-aa",
        "nodes": 1,
        "ntasks_per_node": 1,
        "signal_delay_s": 120,
        "array_parallelism": 1,
        "setup": [f"export PYTHONPATH={sweep}/code/1${{PYTHONPATH:+:$PYTHONPATH}}", "export PYTHONSAFEPATH=1"],
        "srun_args": ["--export=ALL", "--kill-on-bad-exit=0", "--wait=600"],
        "additional_parameters": {"requeue": True},
    }


def test_keys_that_are_given_are_flags(sweep):
    names = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
    config = Slurm(**{name: f"a-{name}" for name in names}, array_parallelism=3, signal_seconds=60, gpu_type="h100")
    given = flags(config, sweep, LARGE, ("one", "two"))
    assert {name: given[name] for name in names} == {name: f"a-{name}" for name in names}
    assert (given["nodes"], given["ntasks_per_node"], given["cpus_per_task"]) == (2, 4, 3)
    assert (given["gpus_per_node"], given["mem"], given["time"]) == ("h100:4", "64G", 90)
    assert (given["array_parallelism"], given["signal_delay_s"], given["job_name"]) == (3, 60, "layouts-aa")
    assert given["srun_args"][-1] == "--cpus-per-task=3"


def test_gpus_are_asked_for_unless_the_site_does_not_manage_them(sweep):
    assert flags(SLURM, sweep, LARGE)["gpus_per_node"] == 4
    assert "gpus_per_node" not in flags(Slurm(ask_for_gpus=False, gpu_type="h100"), sweep, LARGE)
    assert "gpus_per_node" not in flags(Slurm(gpu_type="h100"), sweep, ONE)


def test_further_flags_are_passed_on_unless_they_are_off(sweep):
    extra = {"reservation": "mine", "exclusive": True, "nice": 0, "comment": None, "hold": False}
    extra["kill-on-invalid-dep"] = "yes"
    given = flags(Slurm(extra=extra, requeue=False), sweep)["additional_parameters"]
    # 0 equals False in Python, and is a value.
    assert given == {
        "no-requeue": True,
        "reservation": "mine",
        "exclusive": True,
        "nice": 0,
        "kill-on-invalid-dep": "yes",
    }


@pytest.mark.parametrize(
    ("gib", "word"), [(None, None), (0, "0"), (0.0, "0"), (64, "64G"), (64.0, "64G"), (3.5, "3584M"), (0.5, "512M")]
)
def test_memory_is_told_in_whole_units(gib, word):
    assert batch._memory(gib) == word


def test_the_preamble_comes_before_variables_and_these_are_quoted(sweep):
    config = Slurm(preamble=["module load cuda", "ulimit -c 0"], environment={"A": "it's $HOME", "B": ""})
    assert flags(config, sweep)["setup"][1:6] == [
        "module load cuda",
        "ulimit -c 0",
        "trap - ERR",
        "export A='it'\"'\"'s $HOME'",
        "export B=''",
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
    (sweep / "job.sh").write_text("\n".join([*flags(Slurm(preamble=preamble), sweep)["setup"], "false", "echo trains"]))
    done = subprocess.run(["bash", "job.sh"], cwd=sweep, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (done.stdout + done.stderr).strip().splitlines()[-1].startswith(said)


def test_gpus_are_asked_for_by_the_flag_that_the_site_takes(sweep):
    given = flags(Slurm(gpu_flag="gres", gpu_type="h100"), sweep, LARGE)
    assert (given["additional_parameters"]["gres"], "gpus_per_node" in given) == ("gpu:h100:4", False)
    assert flags(Slurm(gpu_flag="gres"), sweep, LARGE)["additional_parameters"]["gres"] == "gpu:4"
    assert "gres" not in flags(Slurm(gpu_flag="gres"), sweep)["additional_parameters"]
    assert "gres" not in flags(Slurm(gpu_flag="gres", ask_for_gpus=False), sweep, LARGE)["additional_parameters"]
    # What launch.extra says wins, as the nodes may have other devices too.
    extra = Slurm(gpu_flag="gres", extra={"gres": "gpu:4,nvme:1"})
    assert flags(extra, sweep, LARGE)["additional_parameters"]["gres"] == "gpu:4,nvme:1"
    with pytest.raises(ConfigError, match="launch.gpu_flag=gpus: is no flag for GPUs; try gpus-per-node or gres"):
        Slurm(gpu_flag="gpus")


@pytest.mark.parametrize(("shape", "survives"), [(LARGE, True), (ONE, False)])
def test_only_a_job_of_several_nodes_survives_the_loss_of_one(sweep, shape, survives):
    given = flags(Slurm(restarts=1, min_world=1), sweep, shape)
    assert ("no-kill" in given["additional_parameters"]) is survives
    assert ("--no-kill" in given["srun_args"]) is survives
    assert any(line.startswith("export SLURM_NTASKS=") for line in given["setup"]) is survives
    assert "no-kill" not in flags(SLURM, sweep, shape)["additional_parameters"]


def test_the_command_is_quoted_and_runs_in_the_container(sbatch, sweep, tmp_path):
    sbatch(f'cp "$1" {tmp_path}/file; echo "Submitted batch job 123"')
    write_submission(sweep, submission())
    batch.submit(Slurm(container=["apptainer", "exec", "my image.sif"], python="/opt/a b/python"), sweep, submission())
    (line,) = [line for line in (tmp_path / "file").read_text().splitlines() if line.startswith("srun ")]
    words = ["apptainer", "exec", "my image.sif", "/opt/a b/python", "-P", "-m", "titanlab.launch.task"]
    assert shlex.split(line)[-9:] == [*words, str(sweep), "aa"]


# The call of sbatch


def test_an_array_is_submitted_and_its_number_returned(sbatch, sweep, tmp_path):
    sbatch(f'cp "$1" {tmp_path}/file; echo "Submitted batch job 123"')
    given = submission(JobShape(processes=1, tasks_per_node=1, minutes=5), ("one", "two"))
    write_submission(sweep, given)
    assert batch.submit(Slurm(extra={"nice": 0}), sweep, given) == "123"
    text = (tmp_path / "file").read_text()
    heads = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-1%2" in heads
    assert "#SBATCH --job-name=layouts-aa" in heads
    assert "#SBATCH --time=5" in heads
    assert "#SBATCH --nice=0" in heads
    assert not [line for line in heads if "wckey" in line]


def test_the_batch_file_has_texts_as_typed(sbatch, sweep, tmp_path):
    sbatch(f'cp "$1" {tmp_path / "file"}; echo Submitted batch job 123')
    folder = tmp_path / "conf" / "launch"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(
        "defaults: [slurm_schema, _self_]\n"
        "partition: 017\npreamble: [ulimit -c 0]\nsrun_arguments: [--mpi=none, 1_0]\n"
        "extra: {time-min: 12:00:00, deadline: 1:30, gres-flags: off, exclusive: true, hold: false}\n"
        "environment: {A: off, B: 017, C: true}\n"
    )
    flags = read_flags([f"--config-dir={folder.parent}", "launch=site", "+launch.extra.mem=1e3", "launch.qos=5e2"])
    recipe = Loader(flags, flags.overrides).recipe()
    write_submission(sweep, submission())
    batch.submit(recipe.launch, sweep, submission())
    lines = (tmp_path / "file").read_text().splitlines()
    heads = ["time-min=12:00:00", "deadline=1:30", "gres-flags=off", "exclusive", "mem=1e3", "partition=017", "qos=5e2"]
    assert {f"#SBATCH --{head}" for head in heads} <= {*lines}
    assert not [line for line in lines if "hold" in line]
    assert {"export A=off", "export B=017", "export C=true"} <= {*lines}
    assert [line for line in lines if line.startswith("srun") and "--mpi=none 1_0" in line]


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


@pytest.mark.parametrize(("error", "held"), [(None, True), (errno.EWOULDBLOCK, True), (errno.ENOSYS, False)])
def test_sbatch_is_called_under_a_lock_where_there_are_locks(tmp_path, monkeypatch, error, held):
    def flock(descriptor, how):
        if error is not None:
            raise OSError(error, "no")

    monkeypatch.setattr(batch.fcntl, "flock", flock)
    words = batch._sbatch(SLURM, tmp_path / "batch.sh", tmp_path / "intent.json", tmp_path / "lock")
    assert (words[0] == "flock") is held
    # Also without one: an intent that is gone is not submitted.
    assert ["sh", "-c", 'test -e "$0" && exec "$@"', str(tmp_path / "intent.json"), "env"] == words[2 * held :][:5]


def test_variables_that_would_change_the_job_are_unset(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    kept = (
        "SLURM_CONF",
        "SLURM_CLUSTERS",
        "SLURM_JWT",
        "SLURM_TIME_FORMAT",
        "SBATCH_QOS",
        "SBATCH_WCKEY",
        "MY_SLURM_X",
    )
    for name in (*kept, "SLURM_JOB_ID", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "theirs")
    words = batch._sbatch(Slurm(account="mine"), tmp_path / "file", tmp_path / "intent", tmp_path / "lock")
    unset = {word.removeprefix("--unset=") for word in words if word.startswith("--unset=")}
    assert unset == {"SLURM_JOB_ID", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "MASTER_ADDR"}
    assert words[-2:] == ["sbatch", str(tmp_path / "file")]


def test_a_key_of_extra_wins_over_the_shell_as_well(monkeypatch):
    monkeypatch.setenv("SBATCH_WCKEY", "theirs")
    assert "SBATCH_WCKEY" in batch._unwanted(Slurm(extra={"wckey": "mine"}))
    assert "SBATCH_WCKEY" not in batch._unwanted(Slurm(extra={"wckey": None}))


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

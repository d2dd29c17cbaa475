"""Jobs are put into the queue: arrays of one shape, and intents whose submission was interrupted."""

import json

import pytest

from tests.sweep.conftest import quiet
from tests.sweep.studies import SLURM, seeds, study
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Slurm
from titanlab.sweep import decide
from titanlab.sweep.enqueue import settle
from titanlab.sweep.submit import submit

MIXED = [*seeds(2), *seeds(2, shard=2), {"shard": 6}, {"shard": 12}]


def test_long_arrays_are_cut(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.launch.slurm.launcher.MAX_ARRAY", 2)
    submit(study(tmp_path / "runs", seeds(5), launch=Slurm(array_parallelism=1)), quiet)
    assert [job["flags"]["array"] for job in slurm.jobs().values()] == ["0-1%1", "0-1%1", "0-0%1"]


@pytest.mark.parametrize(("limit", "parameters"), [(2, "(null)"), (1001, "bf_interval=2,max_array_tasks=2")])
def test_arrays_are_as_long_as_the_site_allows(slurm, tmp_path, limit, parameters):
    slurm.set(max_array=limit, parameters=parameters)
    submit(study(tmp_path / "runs", seeds(5), launch=SLURM), quiet)
    assert [job["flags"]["array"] for job in slurm.jobs().values()] == ["0-1%2", "0-1%2", "0-0%1"]


def test_variables_of_a_shell_do_not_override_the_batch_file(slurm, tmp_path, monkeypatch):
    for name in ("JOB_NAME", "PARTITION", "TIMELIMIT", "SIGNAL", "EXPORT", "ARRAY_INX", "WAIT", "ACCOUNT", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "theirs")
    # srun's own win over what a job asks for; the last one is of a job with a container.
    for name in ("MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK", "SRUN_CONTAINER", "TITANLAB_SCONTROL"):
        monkeypatch.setenv(name, "1")
    launch = Slurm(account="mine", environment={"MASTER_PORT": "29500"})
    submit(study(tmp_path / "runs", seeds(1), launch=launch), quiet)
    (job,) = slurm.jobs().values()
    # On whose behalf is a matter of the shell's, where launch does not say it.
    assert [name for name in job["environment"] if name.startswith(("SBATCH_", "MASTER_", "SRUN_", "TITANLAB_S"))] == [
        "SBATCH_QOS"
    ]
    assert "export MASTER_PORT=29500" in job["script"].splitlines()


def test_an_answer_of_sbatch_that_is_lost_is_found_in_the_queue(slurm, tmp_path):
    slurm.set(times_out=True)
    submitted = submit(study(tmp_path / "runs", seeds(2), launch=SLURM), quiet)
    assert [new.job_id for new in submitted.submissions] == ["101"]
    assert submitted.folder.submissions()[0].job_id == "101"


@pytest.mark.parametrize("settings", [{}, {"forgets": True}])
def test_an_intent_whose_job_is_there_is_taken_over(slurm, tmp_path, settings):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    _forget_answer(folder)
    slurm.put(101, "COMPLETED")
    slurm.set(**settings)
    lines = []
    settle(folder, lines.append)
    assert lines == ["an interrupted submission is job 101: 2 runs of 1 process"]
    assert submit(wanted, quiet).submissions == ()


def test_an_intent_whose_jobs_have_taken_their_runs_names_is_taken_over(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    (submission,) = folder.submissions()
    _forget_answer(folder)
    job = slurm.jobs()[101]
    job["flags"]["job-name"] = submission.job_name(folder.name, 1)
    assert job["flags"]["job-name"] == f"layouts/{submission.runs[1]}-{submission.token}"
    (slurm.folder / "jobs" / "101.json").write_text(json.dumps(job))
    assert submit(wanted, quiet).submissions == ()
    assert [each.job_id for each in folder.submissions()] == ["101"]


def test_an_intent_without_a_job_is_submitted_again(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    _forget_answer(folder)
    (slurm.folder / "jobs" / "101.json").unlink()
    assert [new.runs for new in submit(wanted, quiet).submissions] == [tuple(each.run_name for each in decide(wanted))]
    assert len(folder.submissions()) == 1


def test_while_slurm_does_not_answer_nothing_is_submitted_twice(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    slurm.set(silent=True)
    with pytest.raises(ConfigError, match="Slurm does not answer "):
        submit(wanted, quiet)
    _forget_answer(folder)
    # It may fall silent just after it was asked.
    with pytest.raises(ConfigError, match="Slurm does not answer, and an earlier submission may have reached it"):
        settle(folder, quiet)
    assert len(slurm.jobs()) == 1


def _forget_answer(folder):
    (path,) = (folder.path / "submissions").glob("*.json")
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "state": "intent", "job_id": None}))

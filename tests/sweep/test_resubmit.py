"""The next attempt of one run goes through a launcher, after every check, and a refusal changes nothing."""

import re
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.conftest import names, quiet
from tests.sweep.studies import SLURM
from titanlab.checkpoint.folders import step_folder
from titanlab.distributed import Host
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.recipe import from_mapping, to_mapping
from titanlab.sweep import checked, resubmit, submitted_with
from titanlab.sweep import enqueue as module
from titanlab.sweep.retry import item_of
from titanlab.techniques.model import llama_account

REFUSED = "invalid account or account/partition combination specified"


@pytest.fixture
def hung(slurm, sweep):
    """A run of the sweep that hung, and its recipe."""
    run = sweep.run(names(sweep)[1])
    return run, from_mapping(run.config())


def save(run, *steps):
    """Checkpoints of a run, as far as is read before a job starts."""
    shapes = {
        name: list(shape) for name, shape in llama_account.account(from_mapping(run.config()).model).parameters.items()
    }
    for step in steps:
        position = {"step": step, "tokens": 384 * step, "data": {"samples": 12 * step}, "parameters": shapes}
        tiny.write_checkpoint(step_folder(run.checkpoints, step), position)


def saved(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_run_that_has_ended_waits_again_as_the_only_one_of_its_job(slurm, sweep, hung):
    run, recipe = hung
    lines = []
    submission = resubmit(run, recipe, lines.append)
    assert (submission.job_id, submission.runs, submission.changes) == ("102", (run.path.name,), {})
    assert lines == ["job 102: 1 run of 1 process"]
    assert slurm.jobs()[102]["states"] == ["PENDING"]
    assert sweep.submissions()[-1] == submission
    assert (sweep.path / submission.code / "code.json").is_file()
    assert submitted_with(run)["minutes"] == SLURM.minutes
    # One that is done is not submitted.
    done = sweep.run(names(sweep)[0])
    assert resubmit(done, from_mapping(done.config()), lines.append) is None
    assert lines[1:] == [f"{done.path} is done. For another like it: repeat=1"]
    assert list(slurm.jobs()) == [101, 102]


@pytest.mark.parametrize(("place", "word"), [(3, "running"), (4, "queued")])
def test_a_run_that_runs_or_waits_is_refused(slurm, sweep, place, word):
    run = sweep.run(names(sweep)[place])
    with pytest.raises(
        ConfigError, match=f"^run={run.path.name}: is {word} already; wait for its end, or titanlab cancel"
    ):
        resubmit(run, from_mapping(run.config()), quiet)
    assert list(slurm.jobs()) == [101]


def test_an_older_checkpoint_becomes_the_newest(slurm, hung):
    run, recipe = hung
    save(run, 2, 4, 6)
    lines = []
    assert resubmit(run, recipe, lines.append, checkpoint=step_folder(run.checkpoints, 2)) is not None
    assert saved(run) == ["step-00000002", "step-00000004.aside", "step-00000006.aside"]
    assert lines[:2] == [
        f"goes on from step 2: step-0000000{step}, which is later, is put aside as step-0000000{step}.aside"
        for step in (4, 6)
    ]


def test_checkpoints_get_their_names_again_if_the_scheduler_refuses(slurm, hung):
    run, recipe = hung
    save(run, 2, 4, 6)
    slurm.set(refuses=REFUSED)
    with pytest.raises(ConfigError, match=f"sbatch says: {REFUSED}"):
        resubmit(run, recipe, quiet, checkpoint=step_folder(run.checkpoints, 2))
    assert saved(run) == ["step-00000002", "step-00000004", "step-00000006"]
    # Nothing is left of the job: a later attempt is free to be submitted.
    slurm.set()
    assert resubmit(run, recipe, quiet).job_id == "102"


def test_without_an_answer_of_the_scheduler_nothing_changes(slurm, hung):
    run, recipe = hung
    save(run, 2, 4)
    slurm.set(silent=True)
    lines = []
    with pytest.raises(ConfigError):
        resubmit(run, recipe, lines.append, checkpoint=step_folder(run.checkpoints, 2))
    assert len(lines) == 1
    assert lines[0].startswith("the scheduler does not answer: ")
    assert saved(run) == ["step-00000002", "step-00000004"]


def test_jobs_of_this_host_are_started(slurm, sweep, hung, monkeypatch):
    run, recipe = hung
    woken = []
    monkeypatch.setattr("titanlab.launch.local.wake", woken.append)
    submission = resubmit(run, replace(recipe, launch=Local()), quiet)
    assert (submission.launcher, list(slurm.jobs())) == ("local", [101])
    assert woken == [sweep.path]


def test_a_run_that_was_never_submitted_has_no_settings(tmp_path):
    assert submitted_with(tiny.begin(tiny.recipe(tmp_path))) is None


def test_a_job_replaces_what_the_recipe_has_now(hung):
    run, recipe = hung
    assert item_of(run, checked(recipe)).changes == {}
    smaller = checked(replace(recipe, training=replace(recipe.training, log_every=7), launch=Slurm(minutes=5)))
    item = item_of(run, smaller)
    assert (item.run, item.shape.processes, item.shape.minutes) == (run.path.name, 1, 5)
    # The launcher is the submission's, and no change of the recipe.
    assert item.changes == {"training": to_mapping(smaller)["training"]}


@pytest.mark.parametrize("launch", [Local(), SLURM], ids=["local", "slurm"])
def test_only_a_job_of_this_host_needs_this_hosts_memory_and_devices(tmp_path, monkeypatch, launch):
    recipe = replace(tiny.recipe(tmp_path, shard=4), launch=launch)
    cluster = replace(recipe.cluster, accelerator="cuda", device="NVIDIA H100 80GB HBM3", per_node=4, nodes=1)
    small = Host(accelerator="cpu", device="cpu", count=1, memory_bytes=10**7)
    monkeypatch.setattr(module, "this_host", lambda: small)
    on_cpus = replace(recipe, cluster=replace(recipe.cluster, device="cpu", per_node=4, nodes=1))
    if launch.runs_here:
        with pytest.raises(ConfigError, match=re.escape("world=4: processes take at least")):
            checked(on_cpus)
        with pytest.raises(ConfigError, match=r"^cluster\."):
            checked(replace(recipe, cluster=cluster))
    else:
        assert checked(on_cpus).layout.world == 4
        assert checked(replace(recipe, cluster=cluster)).cluster.device == "NVIDIA H100 80GB HBM3"

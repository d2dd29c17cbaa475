"""Runs that are cancelled, submitted again, or resumed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.conftest import names, quiet
from tests.sweep.studies import SLURM, study
from titanlab.checkpoint.folders import step_folder
from titanlab.cli.verbs import call
from titanlab.distributed import Host
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.launch.local import LocalLauncher
from titanlab.launch.slurm.launcher import SlurmLauncher
from titanlab.recipe import from_mapping
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import FAILED, cancel, checked, resubmit, submitted_with
from titanlab.sweep import submit as module
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.retry import retry
from titanlab.sweep.submit import submit


def test_cancel_ends_elements_of_arrays_and_tells_those_that_run(slurm, sweep):
    done = cancel(sweep, quiet)
    assert (done.stopping, done.withdrawn) == ([names(sweep)[3]], [names(sweep)[4]])
    # Whoever runs is told, and has the time that it needs.
    assert slurm.jobs()[101]["states"] == ["COMPLETED", "FAILED", "FAILED", "RUNNING", "CANCELLED"]
    assert slurm.jobs()[101]["signals"] == [[3, "INT"]]
    assert sweep.run(names(sweep)[3]).asked_to_cancel()
    outcome = sweep.run(names(sweep)[4]).result()
    assert (outcome.kind, outcome.cause) == ("cancelled", "cancelled before it started")
    # What was cancelled can be done after all.
    assert [each.run for each in retry(sweep, quiet, names=[names(sweep)[4]])] == [names(sweep)[4]]


def test_whoever_cancels_twice_does_not_want_to_wait(slurm, sweep):
    cancel(sweep, quiet, names=[names(sweep)[3]])
    done = cancel(sweep, quiet, names=[names(sweep)[3]])
    assert done.stopping == [names(sweep)[3]]
    assert (slurm.jobs()[101]["states"][3], len(slurm.jobs()[101]["signals"])) == ("CANCELLED", 1)


def test_cancel_is_one_call_for_all_that_wait_and_one_for_all_that_run(slurm, sweep):
    retry(sweep, quiet, outcomes=["hang", "oom"])
    cancel(sweep, quiet)
    calls = [sorted(line.split()) for line in (slurm.folder / "scancel.calls").read_text().splitlines()]
    assert sorted(calls) == [["--signal=INT", "101_[3]"], ["101_[4]", "102_[0-1]"]]


def test_elements_that_somebody_took_out_of_the_queue_are_cancelled_and_can_be_done_again(slurm, sweep):
    """`scancel 101_4`: Slurm itself keeps no record of it."""
    slurm.put(101, "REMOVED", 4)
    reconcile(sweep)
    (run,) = sweep.find([names(sweep)[4]])
    outcome = run.result()
    assert (outcome.kind, outcome.cause) == ("cancelled", "the job was cancelled before it started")
    assert outcome.scheduler == {"job_id": "101_4", "state": "CANCELLED", "exit_code": None}
    done = retry(sweep, quiet, outcomes=["cancelled"])
    assert [each.run for each in done] == [run.path.name]
    assert [len(job["states"]) for job in slurm.jobs().values()] == [5, 1]


def submitted(slurm):
    return [len(job["states"]) for job in slurm.jobs().values()]


def test_ended_runs_of_an_outcome_are_submitted_again_and_keep_their_folders(slurm, sweep):
    done = retry(sweep, quiet, outcomes=["hang"])
    assert [(each.run, each.outcome) for each in done] == [(names(sweep)[1], "hang")]
    assert submitted(slurm) == [5, 1]
    assert sweep.run(names(sweep)[1]).attempts() == [1]
    # It waits now, and is not submitted a third time.
    assert retry(sweep, quiet, outcomes=["hang"]) == []
    assert submitted(slurm) == [5, 1]


def test_named_runs_whatever_their_outcome_but_none_that_is_done_waits_or_runs(slurm, sweep):
    lines = []
    done = retry(sweep, lines.append, names=[*names(sweep)])
    assert {each.outcome for each in done} == {"hang", "oom"}
    left = {line for line in lines if "left alone" in line}
    assert left == {
        f"{names(sweep)[0]} is left alone: done",
        f"{names(sweep)[3]} is left alone: running",
        f"{names(sweep)[4]} is left alone: queued",
    }


def test_stale_runs_start_anew_and_their_folders_are_kept(slurm, sweep):
    done = retry(sweep, quiet, stale=True)
    assert [each.run for each in sorted(done, key=lambda each: str(each.outcome))] == [*names(sweep)[1:3]]
    run = sweep.run(names(sweep)[1])
    before = run.identity()
    assert run.attempts() == []
    aside = sweep.superseded / f"{run.path.name}.1"
    assert (aside / "result.json").is_file()
    assert (aside / "config.yaml").read_text() == (run.path / "config.yaml").read_text()
    assert before is not None


def test_each_launcher_is_asked_about_its_own_jobs(slurm, sweep, tmp_path, monkeypatch):
    here = study(tmp_path / "runs", [{"shard": 1, "seed": 9}])
    monkeypatch.setattr("titanlab.launch.local.wake", lambda sweep: None)
    (name,) = submit(here, quiet).submissions[0].runs
    run = sweep.run(name)
    run.begin_attempt(run.config(), {"code": {"fingerprint": "other"}})
    run.write_result(Outcome(kind=OutcomeKind.HANG, attempt=1, step=3))
    asked = []
    monkeypatch.setattr(SlurmLauncher, "check", lambda self, jobs: asked.append(len(jobs)))
    monkeypatch.setattr(LocalLauncher, "check", lambda self, jobs: asked.append(-len(jobs)))
    assert len(retry(sweep, quiet, outcomes=["hang", "oom"])) == 3
    assert sorted(asked) == [-1, 2]


def test_a_wish_to_cancel_ends_with_the_next_submission(slurm, sweep):
    cancel(sweep, quiet, names=[names(sweep)[4]])
    run = sweep.run(names(sweep)[4])
    assert run.asked_to_cancel()
    retry(sweep, quiet, names=[run.path.name])
    assert run.asked_to_cancel() is None


def test_keys_of_launch_may_change(slurm, sweep):
    retry(sweep, quiet, outcomes=["hang"], overrides=["launch.minutes=90", "launch.partition=large"])
    flags = slurm.jobs()[102]["flags"]
    assert (flags["time"], flags["partition"]) == ("90", "large")
    assert sweep.submissions()[-1].launch["minutes"] == 90


def test_a_run_whose_config_was_edited_is_not_submitted_again(slurm, sweep):
    file = sweep.run(names(sweep)[1]).path / "config.yaml"
    edited, count = re.subn(r"(?m)^  lr: .*$", "  lr: 0.5", file.read_text())
    assert count == 1
    file.write_text(edited)
    with pytest.raises(ConfigError, match=r"^optimizer.lr=0.5: the run was made with .*, by its identity.json"):
        retry(sweep, quiet, outcomes=FAILED)
    assert submitted(slurm) == [5]


def test_a_scheduler_that_does_not_answer_is_told_by_every_verb(slurm, sweep, capsys):
    slurm.set(silent=True)
    lines = []
    # Those that had ended before are known; the others may run.
    done = retry(sweep, lines.append, outcomes=FAILED, dry_run=True)
    assert [each.outcome for each in done] == ["hang", "oom"]
    assert len(lines) == 1
    assert re.fullmatch(
        "the scheduler does not answer: squeue says: .*; runs that may still have a job are left alone", *lines
    )
    assert call(["status", "layouts", "--runs", str(sweep.path.parent)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in said if "the scheduler does not answer: squeue says: squeue: error: Unable" in line]) == 1
    )
    with pytest.raises(ConfigError, match="launch=slurm: Slurm does not answer, and the jobs may go on"):
        cancel(sweep, lines.append)
    assert "the scheduler does not answer" in lines[1]


REFUSED = "invalid account or account/partition combination specified"


@pytest.fixture
def hung(slurm, sweep):
    """A run of the sweep that hung, and its recipe."""
    run = sweep.run(names(sweep)[1])
    return run, from_mapping(run.config())


def save(run, *steps):
    """Checkpoints of a run, as far as is read before a job starts."""
    shapes = {name: list(shape) for name, shape in from_mapping(run.config()).model.account().parameters.items()}
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


def test_a_damaged_checkpoint_is_passed_over_before_the_job_waits(slurm, hung):
    run, recipe = hung
    save(run, 2, 4)
    tiny.write_checkpoint(step_folder(run.checkpoints, 4), "{")
    lines = []
    resubmit(run, replace(recipe, launch=Slurm(minutes=90)), lines.append)
    assert saved(run) == ["step-00000002", "step-00000004.damaged"]
    assert lines[0].startswith("goes on from step 2: step-00000004 is damaged: its file position.json is not JSON")
    # Its settings are those of the latest submission.
    assert submitted_with(run)["minutes"] == 90


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

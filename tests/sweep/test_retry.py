import re

import pytest

from tests.sweep.conftest import names, quiet
from tests.sweep.studies import SLURM, seeds, study
from titanlab.cli.verbs import call
from titanlab.errors import ConfigError
from titanlab.launch.local import LocalLauncher
from titanlab.launch.slurm.launcher import SlurmLauncher
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import FAILED, cancel
from titanlab.sweep.retry import retry
from titanlab.sweep.submit import submit


def submitted(slurm):
    return [len(job["states"]) for job in slurm.jobs().values()]


def test_ended_runs_of_an_outcome_are_submitted_again_and_keep_their_folders(slurm, sweep):
    done = retry(sweep, quiet, outcomes=["hang"])
    assert [(each.run.path.name, each.outcome, each.anew) for each in done] == [(names(sweep)[1], "hang", False)]
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
    assert [(each.run.path.name, each.anew) for each in sorted(done, key=lambda each: str(each.outcome))] == [
        (names(sweep)[1], True),
        (names(sweep)[2], True),
    ]
    run = sweep.run(names(sweep)[1])
    before = run.identity()
    assert run.attempts() == []
    aside = sweep.superseded / f"{run.path.name}.1"
    assert (aside / "result.json").is_file()
    assert (aside / "config.yaml").read_text() == (run.path / "config.yaml").read_text()
    assert before is not None


def test_stale_runs_that_sbatch_refuses_are_left_to_submit(slurm, sweep, tmp_path):
    slurm.set(refuses="invalid account or account/partition combination specified")
    with pytest.raises(ConfigError, match="sbatch says: invalid account"):
        retry(sweep, quiet, stale=True)
    slurm.set()
    wanted = study(tmp_path / "runs", seeds(5), launch=SLURM)
    actions = [each.action for each in submit(wanted, quiet).decisions]
    assert actions == ["done", "submit", "submit", "running", "queued"]
    assert [sweep.run(names(sweep)[index]).result() for index in (1, 2)] == [None, None]
    assert submitted(slurm) == [5, 2]


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


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "arguments=: say nothing of which runs; try --outcome hang,node_fail, --all-failed or --stale, or name"),
        ({"outcomes": ["done"]}, "--outcome=done: is done"),
        ({"names": ["nobody"]}, "run=nobody: fits no run of sweep layouts; try "),
        (
            {"outcomes": ["oom"], "overrides": ["precision=bf16"]},
            "precision=bf16: is not to be changed in a run that has begun; changeable: launch, cluster.per_node",
        ),
        ({"outcomes": ["oom"], "overrides": ["launch.kind=local"]}, "launch.kind=local: would be another launcher"),
        (
            {"outcomes": ["oom"], "overrides": ["launch.partition=fast"]},
            "launch.partition=fast: Slurm knows no such part",
        ),
        ({"outcomes": ["oom"], "overrides": ["launch.minutes=soon"]}, "launch.minutes=soon: "),
    ],
)
def test_mistakes(slurm, sweep, asked, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        retry(sweep, quiet, **asked)
    assert submitted(slurm) == [5]


def test_a_scheduler_that_does_not_answer_is_told_by_every_verb(slurm, sweep, capsys):
    slurm.set(silent=True)
    lines = []
    # Those that had ended before are known; the others may run.
    done = retry(sweep, lines.append, outcomes=FAILED, dry_run=True)
    assert [each.outcome for each in done] == ["hang", "oom"]
    assert len(lines) == 1
    assert re.fullmatch(
        "the scheduler does not answer: squeue says: .*; runs whose jobs it may have are left alone", *lines
    )
    assert call(["status", "layouts", "--runs", str(sweep.path.parent)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        len([line for line in said if "the scheduler does not answer: squeue says: squeue: error: Unable" in line]) == 1
    )
    with pytest.raises(ConfigError, match="launch=slurm: Slurm does not answer, and the jobs may go on"):
        cancel(sweep, lines.append)
    assert "the scheduler does not answer" in lines[1]

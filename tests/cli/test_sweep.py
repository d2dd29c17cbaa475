"""The verb that plans and submits, apart from the planning and the submission."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sweep.fake_slurm.cluster import FakeSlurm
from tests.sweep.files import sweep_text, write_sweep
from tests.sweep.study.test_sweep_files import EXPECTED
from titanlab.cli import main
from titanlab.launch import JobShape
from titanlab.recipe import conf_folder
from titanlab.records import OutcomeKind, identify
from titanlab.sweep import Submitted, plan_lines, plan_study
from titanlab.sweep.plan import Dropped
from titanlab.sweep.rows import estimated
from titanlab.sweep.submit import Decision

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"
GOOD = {"product": {"parallelism": ["fsdp", "fsdp_tp"], "world": [2, 3]}}


@pytest.fixture
def sweep(tmp_path):
    """Arguments of a sweep of two runs, with a point that cannot be run and one that no world fits."""
    return write_sweep(tmp_path, sweep_text(GOOD).replace("global_batch: 8", "global_batch: 4"))


@pytest.fixture
def submissions(monkeypatch):
    """What would have been submitted."""
    made = []

    def submit(study, report, *, force):
        made.append((study, force))
        report("told")
        decisions = [
            Decision(planned=each, run=each.recipe.name, recipe=each.recipe, action="submit") for each in study.planned
        ]
        new = SimpleNamespace(job_id="12", shape=decisions[0].shape, runs=[each.run for each in decisions])
        return Submitted(folder=SimpleNamespace(), decisions=tuple(decisions), submissions=(new,))

    monkeypatch.setattr("titanlab.cli.sweep.submit", submit)
    return made


def test_a_dry_run_tells_the_plan_and_makes_nothing(command, sweep):
    said = command(["sweep", *sweep, "--dry-run"])
    assert said.code == 0
    lines = [" ".join(line.split()) for line in re.sub(r"-[0-9a-f]{8}\b", "", said.out).splitlines()]
    assert lines == [
        "mine: 2 runs (sweeps/mine)",
        "run layout processes action",
        "fsdp-world2 dp_s2 2 submit",
        "fsdp_tp-world2 tp2 2 submit",
        "2 to submit",
        "2 jobs: 4 processes in all; the largest has 2",
        "2 points dropped: 1 by rule, 1 by layout",
        "1 × training.global_batch=4: must be a multiple of the 3 data-parallel processes; try 3",
        "1 × world=3: the other degrees make 2, which does not divide it; try world=2",
        "nothing was submitted (--dry-run)",
    ]


def test_points_that_cannot_fit_into_memory_are_left_out_of_a_sweep(command):
    given = ["sweep", "+sweeps=stack_405b_512gpus", "launch=slurm", "--dry-run", "--json"]
    plan = json.loads(command(given).out)
    assert len(plan["runs"]) == 10
    assert [drop["stage"] for drop in plan["dropped"]] == ["memory"] * 3
    assert {drop["point"].get("schedule") for drop in plan["dropped"]} == {"interleaved_zero_bubble"}
    assert len(json.loads(command([*given, "--keep"]).out)["runs"]) == 13


def test_a_dry_run_without_an_answer_of_slurm_says_so_and_plans(command, sweep, tmp_path, monkeypatch):
    """Slurm's own commands look for a configuration that is not there for a minute, each."""
    fake, config = FakeSlurm(tmp_path / "slurm"), tmp_path / "none.conf"
    for name, value in {**fake.environment, "SLURM_CONF": str(config)}.items():
        monkeypatch.setenv(name, value)
    arguments = ["sweep", *sweep, "--dry-run", "launch=slurm", "cluster=cpu"]
    said = command(arguments)
    problem = f"the scheduler does not answer: SLURM_CONF={config} is not a readable file"
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[-2].startswith(f"{problem}; this plan was not compared with the scheduler's jobs")
    assert "2 to submit" in said.out
    assert json.loads(command([*arguments, "--json"]).out)["problem"] == problem


def test_the_same_as_json(command, sweep):
    said = command(["sweep", *sweep, "--dry-run", "--json", "launch=slurm", "cluster=cpu", "launch.minutes=30"])
    plan = json.loads(said.out)
    assert (plan["sweep"], plan["counts"], plan["space"]) == ("mine", {"submit": 2}, GOOD)
    first = plan["runs"][0]
    assert (first["point"], first["layout"], first["action"]) == (
        {"parallelism": "fsdp", "world": 2},
        "dp_s2",
        "submit",
    )
    assert (first["shape"]["nodes"], first["shape"]["tasks_per_node"], first["shape"]["minutes"]) == (1, 2, 30)
    assert [(each["stage"], each["point"]["world"]) for each in plan["dropped"]] == [("rule", 3), ("layout", 3)]


@pytest.mark.parametrize(("flags", "force"), [([], False), (["--force"], True)])
def test_it_submits_and_returns(here, capsys, sweep, submissions, monkeypatch, flags, force):
    monkeypatch.setattr("titanlab.cli.sweep.follow", lambda folder: pytest.fail("stayed"))
    assert main(["sweep", *sweep, *flags]) == 0
    ((study, forced),) = submissions
    assert ([each.recipe.name for each in study.planned], forced) == (["fsdp-world2", "fsdp_tp-world2"], force)
    assert capsys.readouterr().out.splitlines()[-2:] == ["submitted 2: 12", "next: titanlab status mine --watch"]


def test_jobs_are_told_as_json_and_nothing_else(here, capsys, sweep, submissions):
    assert main(["sweep", *sweep, "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["job"], job["runs"], job["shape"]["processes"]) == ("12", ["fsdp-world2", "fsdp_tp-world2"], 2)


@pytest.mark.parametrize(
    ("outcomes", "first"), [(["done", "done"], "done"), (["done", "oom"], "oom"), (["crash", "nan"], "crash")]
)
def test_waiting_ends_with_the_first_failure_of_its_own(here, sweep, submissions, monkeypatch, outcomes, first):
    rows = [{"run": "of-another-submission", "state": "ended", "outcome": "hang"}]
    names = ("fsdp-world2", "fsdp_tp-world2")
    rows += [{"run": run, "state": "ended", "outcome": each} for run, each in zip(names, outcomes, strict=True)]
    monkeypatch.setattr("titanlab.cli.sweep.follow", lambda folder: rows)
    assert main(["sweep", *sweep, "--wait"]) == OutcomeKind(first).exit_code


def test_the_help_names_every_sweep(command):
    said = command("sweep --help")
    assert said.code == 0
    for path in (conf_folder() / "sweeps").glob("*.yaml"):
        assert path.stem in said.out
    assert max(map(len, said.out.splitlines()[:-2])) <= 120


def test_hydra_answers_for_sweeps_too(command, sweep):
    said = command(["sweep", *sweep, "--cfg", "job", "--package", "training"])
    assert (said.code, said.started) == (0, [])
    assert "\nsteps: 20\n" in said.out
    assert "space:" in command(["sweep", *sweep, "--cfg", "hydra", "--package", "hydra.sweeper"]).out


def test_a_plan_counts_what_is_there_already(monkeypatch):
    found = plan_study(["data=synthetic", "optimizer.schedule.warmup_steps=0", "seed=range(0,5)"])
    shape = JobShape(processes=16, nodes=2, tasks_per_node=8, gpus_per_node=8, minutes=90)
    monkeypatch.setattr("titanlab.sweep.submit.shape_of", lambda recipe: shape)
    actions = [("submit", None), ("done", "done"), ("running", None), ("queued", None), ("ended", "oom")]
    decisions = [
        Decision(planned=each, run=f"run-{action}", recipe=each.recipe, action=action, outcome=outcome)
        for each, (action, outcome) in zip(found.planned, actions, strict=True)
    ]
    dropped = Dropped(point=found.planned[0].point, stage="rule", reason="is wrong")
    lines = plan_lines(replace(found, dropped=(dropped,) * 3), decisions)
    assert lines[7:] == [
        "1 to submit, 1 queued already, 1 running already, 1 done already, 1 ended otherwise",
        "1 job: 16 processes in all, 16 GPUs, 24.0 GPU-hours asked for; the largest has 16",
        f"to run those again: titanlab retry {found.name} --outcome oom",
        "3 points dropped: 3 by rule",
        "  3 × is wrong",
    ]
    assert lines[6].split() == ["run-ended", "single", "16", "24.0", "oom"]


def test_a_plan_says_what_it_will_cost(monkeypatch):
    found = plan_study(
        ["model=llama3_8b", "data=synthetic", "parallelism=fsdp", "cluster=h100", "world=8"], elsewhere=True
    )
    shape = JobShape(processes=8, nodes=1, tasks_per_node=8, gpus_per_node=8, minutes=60)
    monkeypatch.setattr("titanlab.sweep.submit.shape_of", lambda recipe: shape)
    decision = Decision(planned=found.planned[0], run="run", recipe=found.planned[0].recipe, action="submit")
    hours = estimated(found.planned[0].recipe).hours
    assert hours > 0
    assert f"8.0 GPU-hours asked for, about {8 * hours:,.1f} used by estimate; " in plan_lines(found, [decision])[-1]


def test_a_plan_marks_the_runs_of_the_control(command, tmp_path):
    space = {"product": {"ac": ["none", "full"]}}
    given = write_sweep(tmp_path, sweep_text(space, node={"control": {"precision": "fp32"}}))
    lines = command(["sweep", *given, "--dry-run"]).out.splitlines()
    marked = [line.split()[0] for line in lines if line.endswith("  submit, control")]
    assert [run.rpartition("-")[0] for run in marked] == ["control-1", "control-2", "control-3"]
    assert sum(line.endswith("  submit") for line in lines) == 2
    runs = json.loads(command(["sweep", *given, "--dry-run", "--json"]).out)["runs"]
    assert [run["run"] for run in runs if run["control"]] == marked


def test_the_page_shows_what_is_said(command, tmp_path):
    """docs/sweeps.md: its file is a sweep, and what it shows of it is what `titanlab sweep` says."""
    text = PAGE.read_text()
    (file,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"\$ titanlab sweep \+sweeps=mine --dry-run\n(.*?)```", text, re.DOTALL)
    said = command(["sweep", *write_sweep(tmp_path, file), "--dry-run"])
    hashes = re.compile(r"-[0-9a-f]{8}\b")
    assert hashes.sub("", said.out) == hashes.sub("", shown)
    table = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE))
    assert table == {name: str(runs + dropped) for name, (runs, dropped, _) in EXPECTED.items()}


def test_a_warm_up_that_nobody_asked_for_is_shortened_alike_by_both_verbs(command):
    notice = "optimizer.schedule.warmup_steps=2, a tenth of the steps: the default of 200 is more than the run has\n"
    line = "data=synthetic training.steps=20"
    alone = command(f"train {line}")
    assert (alone.code, alone.out) == (0, notice)
    typed = command(f"train {line} optimizer.schedule.warmup_steps=2")
    assert typed.out == ""
    together = command(f"train -m {line} seed=0,1")
    recipes = [alone.started[0], typed.started[0], together.started[0]]
    assert [each.optimizer.schedule.warmup_steps for each in recipes] == [2, 2, 2]
    assert len({identify(each, data="synthetic", hardware="cpu").sha256 for each in recipes}) == 1
    plan = command(f"sweep {line} seed=0,1 --dry-run").out
    assert plan.count(notice) == 1
    plan = json.loads(command(f"sweep {line} seed=0,1 --dry-run --json").out)
    assert plan["notices"] == [notice.strip()]

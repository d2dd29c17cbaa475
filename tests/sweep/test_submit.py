"""Submitting a sweep: what is missing is put into queues, once, as arrays in the order of its rounds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import time

import pytest

from tests.records.test_run_folder_page import keys
from tests.sweep.conftest import quiet
from tests.sweep.studies import SLURM, seeds, study
from titanlab.errors import ConfigError
from titanlab.launch import write_submission
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.launch.local import jobs_in_order
from titanlab.records import RECORD, Outcome, OutcomeKind, identify
from titanlab.sweep import SweepTable, check_study, decide, folder_of, silence_of
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.space import control_points
from titanlab.sweep.submit import check_folder, settle, submit

MIXED = [*seeds(2), *seeds(2, shard=2), {"shard": 6}, {"shard": 12}]


def ended(run, kind=OutcomeKind.DONE):
    run.begin_attempt(run.config(), {"code": {"fingerprint": "old"}})
    run.write_result(Outcome(kind=kind, attempt=1, step=3))


def actions(decisions):
    return [each.action for each in decisions]


def test_each_shape_is_one_array_with_its_own_resources(slurm, tmp_path):
    launch = Slurm(minutes=10, cpus_per_task=2, memory_gib=3.5, partition="large", account="mine", extra={"qos_": 1})
    submitted = submit(study(tmp_path / "runs", MIXED, launch=launch), quiet)
    told = {}
    for number, job in slurm.jobs().items():
        flags = job["flags"]
        told[number] = [flags[name] for name in ("nodes", "ntasks-per-node", "array", "cpus-per-task", "mem", "time")]
        assert flags["partition"] == "large"
        assert flags["account"] == "mine"
        assert flags["qos-"] == "1"
        assert flags["signal"] == "USR2@120"
        assert flags["requeue"] is True
        assert "wckey" not in flags
        assert "gpus-per-node" not in flags
    assert list(told.values()) == [
        ["1", "1", "0-1%2", "2", "3584M", "10"],
        ["1", "2", "0-1%2", "2", "3584M", "10"],
        ["2", "3", "0-0%1", "2", "3584M", "10"],
        ["3", "4", "0-0%1", "2", "3584M", "10"],
    ]
    assert [(new.job_id, len(new.runs)) for new in submitted.submissions] == [
        ("101", 2),
        ("102", 2),
        ("103", 1),
        ("104", 1),
    ]


@pytest.mark.usefixtures("whole_snapshots")
def test_a_job_runs_the_snapshot_and_finds_its_run_by_token_and_index(slurm, tmp_path):
    launch = Slurm(
        preamble=["module load cuda"],
        environment={"NCCL_DEBUG": "WARN it"},
        container=["apptainer", "exec", "image.sif"],
        python="python3",
        cpus_per_task=4,
        srun_arguments=["--mpi=none"],
        requeue=False,
    )
    submitted = submit(study(tmp_path / "runs", seeds(3), launch=launch), quiet)
    (job,) = slurm.jobs().values()
    (submission,) = submitted.folder.submissions()
    snapshot = submitted.folder.path / submission.code
    assert (snapshot / "titanlab" / "sweep" / "submit.py").is_file()
    assert job["flags"]["job-name"] == f"layouts-{submission.token}"
    assert job["flags"]["no-requeue"] is True
    lines = job["script"].splitlines()
    order = ["module load cuda", "export NCCL_DEBUG='WARN it'", "export PYTHONSAFEPATH=1"]
    assert [line for line in lines if line in order] == order
    assert f"export PYTHONPATH={snapshot}${{PYTHONPATH:+:$PYTHONPATH}}" in lines
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert "--export=ALL --kill-on-bad-exit=0" in command
    assert "--cpus-per-task=4 --mpi=none apptainer exec image.sif python3 -P -m titanlab.launch.task" in command
    assert shlex.split(command)[-2:] == [str(submitted.folder.path), submission.token]
    assert list(submission.runs) == [each.run for each in submitted.decisions]
    assert not list((submitted.folder.path / "jobs").glob("*.pkl"))


def test_submitting_twice_submits_nothing_the_second_time(slurm, tmp_path):
    wanted = study(tmp_path / "runs", MIXED, launch=SLURM)
    assert actions(decide(wanted)) == ["submit"] * 6
    first, second = submit(wanted, quiet), submit(wanted, quiet)
    assert len(first.submissions) == 4
    assert second.submissions == ()
    assert actions(second.decisions) == ["queued"] * 6
    # A run is known by what it is, and not by its label.
    named = [dataclasses.replace(each, recipe=dataclasses.replace(each.recipe, name="x")) for each in wanted.planned]
    assert submit(dataclasses.replace(wanted, planned=tuple(named)), quiet).submissions == ()
    assert len(slurm.jobs()) == 4


def test_what_is_done_runs_or_ended_is_left_alone(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(4), launch=SLURM)
    folder = submit(wanted, quiet).folder
    runs = [folder.run(each.run) for each in decide(wanted)]
    ended(runs[0])
    slurm.put(101, "COMPLETED", 0)
    slurm.put(101, "RUNNING", 1)
    ended(runs[2], OutcomeKind.OOM)
    slurm.put(101, "FAILED", 2)
    more = study(tmp_path / "runs", seeds(5), launch=SLURM)
    found = submit(more, quiet)
    assert actions(found.decisions) == ["done", "running", "ended", "queued", "submit"]
    assert [each.outcome for each in found.decisions] == ["done", None, "oom", None, None]
    assert [new.runs for new in found.submissions] == [(found.decisions[4].run,)]


def test_force_puts_ended_runs_aside_and_does_them_anew(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    first, second = (folder.run(each.run) for each in decide(wanted))
    ended(first)
    found = submit(wanted, quiet, force=True)
    assert actions(found.decisions) == ["submit", "queued"]
    assert first.result() is None
    assert (folder.superseded / f"{first.path.name}.1" / "result.json").is_file()
    assert [new.runs for new in found.submissions] == [(first.path.name,)]
    assert second.path.is_dir()


def test_force_that_sbatch_refuses_leaves_runs_to_submit(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    folder = submit(wanted, quiet).folder
    for run in folder.runs():
        ended(run)
    slurm.put(101, "COMPLETED")
    slurm.set(refuses="invalid account or account/partition combination specified")
    with pytest.raises(ConfigError, match="sbatch says: invalid account"):
        submit(wanted, quiet, force=True)
    reconcile(folder)
    assert [run.result() for run in folder.runs()] == [None, None]
    assert [(row["state"], row["outcome"], row["job_id"]) for row in SweepTable(folder).rows()] == [
        ("prepared", None, None)
    ] * 2
    slurm.set()
    found = submit(wanted, quiet)
    assert actions(found.decisions) == ["submit", "submit"]
    assert [new.job_id for new in found.submissions] == ["102"]
    assert actions(submit(wanted, quiet).decisions) == ["queued", "queued"]


def test_a_job_is_no_older_than_its_runs_whatever_the_clock_says(slurm, tmp_path, monkeypatch):
    wanted = study(tmp_path / "runs", seeds(1), launch=SLURM)
    ahead = time.time() + 30
    monkeypatch.setattr("titanlab.records.run_folder.time.time", lambda: ahead)
    folder = submit(wanted, quiet).folder
    monkeypatch.undo()
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    (path,) = (folder.path / "submissions").glob("*.json")
    path.unlink()
    (slurm.folder / "jobs" / "101.json").unlink()
    # The folder is another host's, whose clock is ahead.
    assert actions(submit(wanted, quiet).decisions) == ["submit"]
    assert actions(submit(wanted, quiet).decisions) == ["queued"]


def test_points_and_manifest(slurm, tmp_path):
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM, dropped=[{"seed": 9}])
    folder = submit(wanted, quiet).folder
    points = folder.points()
    # The estimate is tested on its own; a dropped point has none.
    assert [point.pop("estimate", {}).get("layout") for point in points] == ["single", "single", None]
    assert points == [
        {"point": {"shard": 1, "seed": 0}, "repeat": 0, "run": decide(wanted)[0].run, "dropped": None},
        {"point": {"shard": 1, "seed": 1}, "repeat": 0, "run": decide(wanted)[1].run, "dropped": None},
        {"point": {"seed": 9}, "repeat": 0, "run": None, "dropped": {"stage": "rule", "reason": "is wrong"}},
    ]
    manifest = folder.manifest()
    assert (manifest["origin"], manifest["points"], manifest["dropped"]) == ("sweeps/layouts", 3, 1)
    # A point that the file no longer has keeps its row as long as it has a run.
    submit(study(tmp_path / "runs", seeds(3)[1:], launch=SLURM), quiet)
    assert [row["point"]["seed"] for row in folder.points()] == [1, 2, 0]


def test_slurm_that_does_not_answer_is_told_before_anything_is_made(slurm, tmp_path):
    slurm.set(silent=True)
    wanted = study(tmp_path / "runs", seeds(1), launch=SLURM)
    assert silence_of(wanted).startswith("the scheduler does not answer: sinfo says: sinfo: error: Unable to contact")
    assert actions(decide(wanted, answered=False)) == ["submit"]
    # What Slurm's own command says is all that a person has to go by.
    rule = r"launch=slurm: Slurm does not answer \(sinfo says: .*connect failure\)\); try again when `sinfo` answers"
    with pytest.raises(ConfigError, match=rule):
        submit(wanted, quiet)
    assert not (tmp_path / "runs").exists()


def test_without_slurm_a_plan_can_be_made_and_nothing_submitted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = study(tmp_path / "runs", seeds(1), launch=SLURM)
    assert actions(decide(wanted)) == ["submit"]
    with pytest.raises(ConfigError, match="launch=slurm: Slurm is not here: there is no sbatch on PATH"):
        submit(wanted, quiet)
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_another_sweep(slurm, tmp_path):
    submit(study(tmp_path / "runs", seeds(1), launch=SLURM), quiet)
    other = study(tmp_path / "runs", seeds(2), launch=SLURM, origin="sweeps/other")
    with pytest.raises(
        ConfigError, match=r"sweep=layouts: .* belongs to another sweep \(sweeps/layouts\); .*layouts-2"
    ):
        check_study(other)
    typed = study(tmp_path / "runs", seeds(1), launch=SLURM, name="typed", origin="command line")
    submit(typed, quiet)
    submit(study(tmp_path / "runs", seeds(3), launch=SLURM, name="typed", origin="command line"), quiet)
    with pytest.raises(ConfigError, match=r"belongs to another sweep \(of seed, shard\)"):
        check_study(study(tmp_path / "runs", [{"steps": 3}], launch=SLURM, name="typed", origin="command line"))


@pytest.mark.parametrize("is_listed", [False, True])
def test_what_sbatch_refuses_is_one_line_and_leaves_no_intent(slurm, tmp_path, capfd, is_listed):
    """Jobs that no node can run are in the queue for some minutes, as failed: they are not a submission."""
    slurm.set(refuses="Memory specification can not be satisfied", keeps_refused=is_listed)
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    for _ in range(2):
        with pytest.raises(ConfigError, match="launch=slurm: sbatch says: Memory specification can not be satisfied"):
            submit(wanted, quiet)
        assert folder_of(wanted).submissions() == []
        assert actions(decide(wanted)) == ["submit"] * 2
    assert capfd.readouterr() == ("", "")
    slurm.set()
    assert [new.job_id for new in submit(wanted, quiet).submissions] == ["103" if is_listed else "101"]


def test_without_submitit_nothing_is_submitted_and_a_plan_is_still_made(slurm, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "submitit" else real(name))
    wanted = study(tmp_path / "runs", seeds(2), launch=SLURM)
    told = "launch=slurm: needs submitit to start jobs, which is not installed; pip install submitit"
    with pytest.raises(ConfigError, match=re.escape(told)):
        submit(wanted, quiet)
    assert not (tmp_path / "runs" / "layouts").exists()
    assert actions(decide(wanted)) == ["submit", "submit"]


@pytest.mark.parametrize(
    ("folder", "launch", "told"),
    [
        ("a:b", SLURM, "has ':' in it, at which PYTHONPATH is split; give runs=FOLDER, or the sweep, a path without"),
        ("a:b", Local(), "has ':' in it, at which PYTHONPATH is split"),
        ("a%j", SLURM, "has '%' in it, which launch=slurm replaces in the paths of logs"),
        ("a\\b", SLURM, r"has '\\' in it, which launch=slurm replaces in the paths of logs"),
        ("a%j", Local(), None),
    ],
)
def test_a_folder_whose_path_means_something_else_is_refused(slurm, tmp_path, folder, launch, told):
    wanted = study(tmp_path / folder / "runs", seeds(1), launch=launch)
    if told is None:
        check_study(wanted)
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        submit(wanted, quiet)
    assert not (tmp_path / folder).exists()
    # Also one that was moved there.
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_folder(tmp_path / folder / "runs", [launch])


@pytest.mark.parametrize(("limit", "parameters"), [(2, "(null)"), (1001, "bf_interval=2,max_array_tasks=2")])
def test_arrays_are_as_long_as_the_site_allows(slurm, tmp_path, limit, parameters):
    slurm.set(max_array=limit, parameters=parameters)
    submit(study(tmp_path / "runs", seeds(5), launch=SLURM), quiet)
    assert [job["flags"]["array"] for job in slurm.jobs().values()] == ["0-1%2", "0-1%2", "0-0%1"]


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
    assert [new.runs for new in submit(wanted, quiet).submissions] == [tuple(each.run for each in decide(wanted))]
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


def repeated(wanted, *, repeats, controls):
    """The study with repeats of every point, and a control like its first point."""
    planned = []
    for each in wanted.planned:
        for repeat in range(repeats):
            recipe = dataclasses.replace(each.recipe, repeat=repeat, name=f"{each.recipe.name}-r{repeat}")
            point = dataclasses.replace(each.point, repeat=repeat)
            identity = identify(recipe, data="tiny", hardware="cpu", repeat=repeat)
            planned.append(dataclasses.replace(each, recipe=recipe, point=point, identity=identity))
    first = wanted.planned[0]
    for point in control_points({}, repeats) if controls else []:
        recipe = dataclasses.replace(first.recipe, repeat=point.repeat, name=f"control-{point.repeat}")
        identity = identify(recipe, data="tiny", hardware="cpu", repeat=point.repeat)
        planned.append(dataclasses.replace(first, recipe=recipe, point=point, identity=identity))
    return dataclasses.replace(wanted, planned=tuple(planned))


def test_jobs_of_two_shapes_take_turns_on_this_host(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.sweep.submit.wake", lambda folder: None)
    wanted = repeated(study(tmp_path / "runs", [{"shard": 1}, {"shard": 2}]), repeats=2, controls=True)
    folder = submit(wanted, quiet).folder
    submitted = folder.submissions()
    assert len(submitted) == 2  # one for each shape
    names = [job.run.rpartition("-")[0] for job in jobs_in_order(folder.path)]
    assert names == ["control-1000", "dp_s1-r0", "dp_s2-r0", "control-1001", "dp_s2-r1", "dp_s1-r1", "control-1002"]
    marked = [(point["run"].rpartition("-")[0], point.get("control", False)) for point in folder.points()]
    assert [name for name, is_control in marked if is_control] == ["control-1000", "control-1001", "control-1002"]
    # The plan keeps the order of the space.
    assert [name for name, is_control in marked if not is_control] == ["dp_s1-r0", "dp_s1-r1", "dp_s2-r0", "dp_s2-r1"]
    assert all("CPUs were not measured" in point["estimate"]["note"] for point in folder.points())


def test_a_later_batch_comes_after_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.sweep.submit.wake", lambda folder: None)
    submit(study(tmp_path / "runs", [{"seed": 0}]), quiet)
    folder = submit(study(tmp_path / "runs", [{"seed": 0}, {"seed": 1}]), quiet).folder
    assert [job.run.rpartition("-")[0] for job in jobs_in_order(folder.path)] == ["seed0", "seed1"]
    # As an earlier version has written them.
    for each in folder.submissions():
        write_submission(folder.path, dataclasses.replace(each, batch="", places=()))
    assert [job.run.rpartition("-")[0] for job in jobs_in_order(folder.path)] == ["seed0", "seed1"]


def test_every_file_and_every_key(slurm, tmp_path):
    folder = submit(study(tmp_path / "runs", seeds(2), launch=SLURM), quiet).folder
    (submission,) = folder.submissions()
    told = keys("A sweep's folder")
    runs = {run.path.name for run in folder.runs()}
    names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
    assert names - runs <= {word.split("/")[0] for word in told}
    files = [folder.path / "sweep.json", folder.path / submission.code / RECORD]
    files += (folder.path / "submissions").rglob("*.json")
    assert len(files) == 3
    for text in [*(file.read_text() for file in files), *(folder.path / "points.jsonl").read_text().splitlines()]:
        assert set(json.loads(text)) - {"schema"} <= told, text
    assert set(submission.shape.to_mapping()) <= told

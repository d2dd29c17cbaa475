"""Jobs of a sweep start in the order of its rounds, whatever their shapes."""

from __future__ import annotations

import dataclasses

from tests.sweep.conftest import quiet
from tests.sweep.studies import SLURM, study
from titanlab.launch import write_submission
from titanlab.launch.local import jobs_in_order
from titanlab.records import identify
from titanlab.sweep.request import control_points
from titanlab.sweep.submit import submit


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
    assert [name for name, is_control in marked if not is_control] == [
        "dp_s1-r0",
        "dp_s1-r1",
        "dp_s2-r0",
        "dp_s2-r1",
    ]
    assert all("CPUs were not measured" in point["estimate"]["note"] for point in folder.points())


def test_the_tasks_of_an_array_are_in_that_order(slurm, tmp_path):
    points = [{"seed": 0}, {"seed": 1}]
    folder = submit(repeated(study(tmp_path / "runs", points, launch=SLURM), repeats=2, controls=False), quiet).folder
    (array,) = folder.submissions()
    assert [run.rpartition("-")[0] for run in array.runs] == ["seed0-r0", "seed1-r0", "seed1-r1", "seed0-r1"]


def test_a_later_batch_comes_after_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.sweep.submit.wake", lambda folder: None)
    submit(study(tmp_path / "runs", [{"seed": 0}]), quiet)
    folder = submit(study(tmp_path / "runs", [{"seed": 0}, {"seed": 1}]), quiet).folder
    assert [job.run.rpartition("-")[0] for job in jobs_in_order(folder.path)] == ["seed0", "seed1"]
    # As an earlier version has written them.
    for each in folder.submissions():
        write_submission(folder.path, dataclasses.replace(each, batch="", places=()))
    assert [job.run.rpartition("-")[0] for job in jobs_in_order(folder.path)] == ["seed0", "seed1"]

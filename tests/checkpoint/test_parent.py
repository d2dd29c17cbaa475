"""The parent of a run, as the recipe's `checkpoint.load_from` names it."""

import pytest

from tests import tiny
from titanlab.checkpoint import parent_of
from titanlab.checkpoint.folders import step_folder


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 4 and 8."""
    run = tiny.begin(tiny.recipe(tmp_path / "runs"))
    for step in (4, 8):
        saved(step_folder(run.checkpoints, step), step)
    return run


def saved(folder, step):
    tiny.write_checkpoint(folder, {"step": step, "parameters": {}})
    return folder


def test_a_run_that_starts_from_nothing_has_no_parent():
    assert parent_of(None) == {}


@pytest.mark.parametrize(
    ("form", "step"),
    [("{run}", 8), ("{run}/checkpoints", 8), ("{run}/checkpoints/step-00000004", 4), ("{run}/checkpoints/step-4", 4)],
)
def test_the_parent_is_named_by_its_sweep_and_folder(run, form, step):
    found = parent_of(form.format(run=run.path))
    assert found == {"parent_run": f"single/{run.path.name}", "parent_step": step}


@pytest.mark.parametrize(("place", "form"), [("", "."), ("", "checkpoints/step-8"), ("checkpoints", "step-8")])
def test_a_path_from_within_the_run_names_it_too(run, monkeypatch, place, form):
    """Its name was `/`."""
    monkeypatch.chdir(run.path / place)
    assert parent_of(form) == {"parent_run": f"single/{run.path.name}", "parent_step": 8}


def test_a_checkpoint_outside_of_a_run_is_named_by_its_path(tmp_path, monkeypatch):
    folder = saved(tmp_path / "step-00000003", 3)
    expected = {"parent_run": str(folder), "parent_step": 3}
    assert parent_of(str(folder)) == expected
    monkeypatch.chdir(tmp_path)
    assert parent_of("step-3") == expected


def test_a_link_names_the_run_that_it_leads_to(run, tmp_path):
    """It was an error of Python's: the step was read from the link's own name."""
    (tmp_path / "good").symlink_to(step_folder(run.checkpoints, 4))
    assert parent_of(str(tmp_path / "good")) == {"parent_run": f"single/{run.path.name}", "parent_step": 4}


def test_a_copy_of_a_checkpoint_has_any_name(tmp_path):
    folder = saved(tmp_path / "best-of-three", 3)
    assert parent_of(str(folder)) == {"parent_run": str(folder), "parent_step": 3}


def test_a_checkpoint_that_is_gone_is_no_error(run, tmp_path):
    """A run that has begun may be submitted again when its parent has been removed."""
    assert parent_of(f"{run.path}/checkpoints/step-5") == {}
    assert parent_of(str(tmp_path / "gone")) == {}

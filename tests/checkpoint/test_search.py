"""The checkpoint of a run that a person names, in every form that is typed."""

import pytest

from tests import tiny
from titanlab.checkpoint import find_run_or_checkpoint
from titanlab.checkpoint.folders import step_folder
from titanlab.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path / "runs"))
    for step in (4, 8):
        tiny.write_checkpoint(step_folder(run.checkpoints, step), "")
    return run


@pytest.mark.parametrize(
    ("form", "step"),
    [
        ("{run}", None),
        ("{run}/", None),
        ("{run}/checkpoints", None),
        ("{run}/checkpoints/step-8", 8),
        ("{run}/checkpoints/step-00000004", 4),
        ("{run}/checkpoints/step-00000004/", 4),
        ("{run}/logs/../checkpoints/step-4", 4),
        ("single/{name}/checkpoints/step-4", 4),
        ("single/{name}", None),
        ("{name}", None),
    ],
)
def test_forms(tmp_path, run, form, step):
    text = form.format(run=run.path, name=run.path.name)
    found, checkpoint = find_run_or_checkpoint(text, tmp_path / "runs")
    assert found.path.resolve() == run.path
    assert checkpoint == (None if step is None else step_folder(found.checkpoints, step))


def test_from_within_and_by_a_link(tmp_path, run, monkeypatch):
    (tmp_path / "good").symlink_to(step_folder(run.checkpoints, 4))
    assert find_run_or_checkpoint(str(tmp_path / "good"), "runs")[1] == step_folder(run.checkpoints, 4)
    monkeypatch.chdir(step_folder(run.checkpoints, 8))
    assert find_run_or_checkpoint(".", "runs")[1] == step_folder(run.checkpoints, 8)
    monkeypatch.chdir(run.checkpoints)
    assert find_run_or_checkpoint("step-4", "runs")[1] == step_folder(run.checkpoints, 4)


def test_a_step_that_is_not_there(run):
    with pytest.raises(ConfigError, match="^run=.*/step-5: the run has no whole checkpoint of this step; it has 4, 8$"):
        find_run_or_checkpoint(f"{run.checkpoints}/step-5", "runs")


def test_a_checkpoint_outside_of_a_run_is_no_run(tmp_path):
    step_folder(tmp_path, 4).mkdir()
    with pytest.raises(ConfigError, match="fits no run"):
        find_run_or_checkpoint(str(step_folder(tmp_path, 4)), tmp_path / "runs")

"""Where an attempt begins: its run's newest whole checkpoint, else another run's, else given weights, else nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.checkpoint.one_process import ALONE
from tests.weights.saved import module, run_of, save
from titanlab.checkpoint import DamagedCheckpoint
from titanlab.errors import ConfigError, DamagedPosition
from titanlab.train.train import load_start

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
NOWHERE = 99
"""The seed of a model that nothing has filled."""


def started(recipe, run, *, attempt=1, restore=lambda position: position.step):
    """Position, result of `restore`, warnings, and the seed of the checkpoint whose weights the model has."""
    model = module(recipe.model, NOWHERE)
    result = load_start(
        recipe, run, attempt, model, torch.optim.SGD(model.parameters()), ALONE, restore=restore
    )  # fmt: skip
    weight = next(model.parameters())
    seeds = [seed for seed in range(100) if torch.equal(next(module(recipe.model, seed).parameters()), weight)]
    return (*result, seeds)


@pytest.fixture
def begun(tmp_path):
    return run_of(tmp_path / "runs", layers=1)


def test_a_damaged_checkpoint_and_a_position_that_cannot_be_restored_are_passed_over_with_a_line(begun):
    recipe, run = begun
    for step in (2, 4):
        save(run, recipe.model, step=step, seed=step)

    def restore(position):
        if position.step == 4:
            raise DamagedPosition("data.samples", "a\nb", "is none", "x")
        return position.step

    (run.checkpoints / "step-00000006").mkdir()
    (run.checkpoints / "step-00000006" / "index.json").write_text("{")
    position, result, warnings, seeds = started(recipe, run, restore=restore)
    # The older one replaces every value of the newer one.
    assert (position.step, result, seeds) == (2, 2, [2])
    assert "step-00000006" in warnings[0]
    assert "its position.json has data.samples=a b: is none" in warnings[1]
    assert not any("\n" in warning for warning in warnings)


def test_a_person_s_choice_of_a_checkpoint_is_not_replaced_by_an_older_one(begun, monkeypatch):
    recipe, run = begun
    for step in (2, 4):
        newest = save(run, recipe.model, step=step)
    (newest / "index.json").write_text("{")
    monkeypatch.setattr(type(run), "has_chosen", lambda self, attempt: True)
    with pytest.raises(DamagedCheckpoint):
        started(recipe, run)
    # Nor does a run begin anew if all of its checkpoints are damaged.
    monkeypatch.undo()
    (run.checkpoints / "step-00000002" / "index.json").write_text("{")
    with pytest.raises(ConfigError):
        started(recipe, run)


def other_run(tmp_path):
    recipe, other = run_of(tmp_path / "others", layers=1)
    save(other, recipe.model, step=3, seed=3, tracker="theirs", routing={})
    return other


def test_another_run_s_checkpoint_is_taken_whole_but_for_its_tracker(begun, tmp_path):
    recipe, run = begun
    checkpoint = replace(recipe.checkpoint, load_from=str(other_run(tmp_path).path))
    position, result, _, seeds = started(replace(recipe, checkpoint=checkpoint), run)
    assert (position.step, position.tracker, result, seeds) == (3, None, 3, [3])

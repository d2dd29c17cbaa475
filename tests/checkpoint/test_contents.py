"""What a checkpoint contains, checked before anything starts."""

import pytest

from tests import tiny
from titanlab.checkpoint import check_checkpoint, check_step, read_contents
from titanlab.checkpoint.folders import step_folder
from titanlab.errors import ConfigError


def made(folder, step):
    path = step_folder(folder, step)
    tiny.write_checkpoint(path, {"step": step, "parameters": {"a.weight": [2, 3]}})
    return path


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({"a.weight": (2, 4)}, "a.weight is 2×3 there and 2×4 here"),
        ({"b.weight": (2, 3)}, "b.weight is absent there and 2×3 here"),
        ({"a.weight": (2, 3), "b.weight": (1,)}, "b.weight is absent there and 1 here"),
        ({}, "a.weight is 2×3 there and absent here"),
    ],
)
def test_another_models_checkpoint_is_refused(tmp_path, mine, said):
    with pytest.raises(ConfigError, match=f"^run=.*is of another model: {said}; choose"):
        check_checkpoint(made(tmp_path, 1), mine, "run")


def test_the_same_models_checkpoint_is_taken(tmp_path):
    check_checkpoint(made(tmp_path, 1), {"a.weight": (2, 3)}, "run")


@pytest.mark.parametrize("text", ["", "{}", "not JSON", None])
def test_a_position_that_cannot_be_read_is_said(tmp_path, text):
    path = made(tmp_path, 1)
    tiny.write_checkpoint(path, text or "")
    if text is None:
        (path / "position.json").unlink()
    with pytest.raises(
        ConfigError, match=r"^run=.*position.json (is missing|is no JSON \(.+\)|does not fit \(.+\)); give another"
    ):
        check_checkpoint(path, {"a.weight": (2, 3)}, "run")


def test_a_run_must_be_longer_than_what_it_starts_from(tmp_path):
    path = made(tmp_path, 5)
    saved = read_contents(path, "run").saved
    check_step(path, saved, 6)
    with pytest.raises(ConfigError, match=r"^training.steps=5: the checkpoint .* is of step 5 already; try 10$"):
        check_step(path, saved, 5)

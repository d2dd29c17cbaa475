"""Names of checkpoints, and which of them count."""

import json

import pytest

from titanlab.checkpoint.folders import check_shapes, check_step, checkpoints, find, latest, step_folder
from titanlab.checkpoint.schema import Checkpoint
from titanlab.errors import ConfigError


def made(folder, step, *, whole=True, shapes=None):
    path = step_folder(folder, step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"")
    (path / "position.json").write_text(json.dumps({"step": step, "parameters": shapes or {"a.weight": [2, 3]}}))
    if whole:
        (path / ".metadata").write_bytes(b"")
    return path


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    for step in (2, 10, 9, 100_000):
        made(tmp_path, step)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-00000002", "step-00000009", "step-00000010", "step-00100000",
    ]  # fmt: skip
    assert latest(tmp_path) == step_folder(tmp_path, 100_000)


def test_what_is_not_whole_does_not_count(tmp_path):
    kept = made(tmp_path, 3)
    made(tmp_path, 4, whole=False)
    made(tmp_path, 5).rename(tmp_path / "step-00000005.part")
    (tmp_path / "notes").mkdir()
    assert checkpoints(tmp_path) == [kept]
    assert latest(tmp_path) == kept


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(tmp_path):
    old, new = made(tmp_path / "checkpoints", 1), made(tmp_path / "checkpoints", 2)
    assert find(str(old), "k") == old
    assert find(str(tmp_path), "k") == new
    assert find(str(tmp_path / "checkpoints"), "k") == new


def test_a_path_without_a_whole_checkpoint_is_refused(tmp_path):
    unfinished = made(tmp_path / "checkpoints", 1, whole=False)
    for path, rule in [
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "holds no complete"),
        (unfinished, "holds no"),
    ]:
        with pytest.raises(ConfigError, match=f"^checkpoint.load_from=.*{rule}.*; give "):
            find(str(path), "checkpoint.load_from")


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
        check_shapes(made(tmp_path, 1), mine, "run")


def test_the_same_models_checkpoint_is_taken(tmp_path):
    check_shapes(made(tmp_path, 1), {"a.weight": (2, 3)}, "run")


@pytest.mark.parametrize("text", ["", "{}", "not JSON", None])
def test_a_position_that_cannot_be_read_is_said(tmp_path, text):
    path = made(tmp_path, 1)
    (path / "position.json").unlink()
    if text is not None:
        (path / "position.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^run=.*cannot be read \(\w+\); give another"):
        check_shapes(path, {"a.weight": (2, 3)}, "run")


def test_a_run_must_be_longer_than_what_it_starts_from(tmp_path):
    path = made(tmp_path, 5)
    check_step(path, 6)
    with pytest.raises(ConfigError, match=r"^training.steps=5: the checkpoint .* is of step 5 already; try 10$"):
        check_step(path, 5)


@pytest.mark.parametrize("name", ["every", "keep"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=f"^checkpoint.{name}=-1: must not be negative"):
        Checkpoint(**{name: -1})

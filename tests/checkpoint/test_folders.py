"""Which checkpoint a text names, which of them count, and what they contain: checked before anything starts."""

from __future__ import annotations

import os

import pytest

from tests import tiny
from titanlab.checkpoint import (
    DamagedCheckpoint,
    earlier_hint,
    fall_back,
    find,
    find_run_or_checkpoint,
    index,
    latest,
    parent_of,
    put_aside,
    put_back,
    read_contents,
    remove,
)
from titanlab.checkpoint.folders import checkpoints, step_folder
from titanlab.errors import ConfigError


def made(folder, step, *, whole=True, shapes=None):
    path = step_folder(folder, step)
    tiny.write_checkpoint(path, {"step": step, "parameters": shapes or {"a.weight": [2, 3]}})
    if not whole:
        (path / "index.json").unlink()
    return path


def test_a_damaged_one_is_renamed_if_there_is_one_before_it(tmp_path):
    old, new = made(tmp_path, 1), made(tmp_path, 2)
    damaged = DamagedCheckpoint("run", new, "is damaged: its file x is missing", earlier_hint(new))
    line = "goes on from step 1: step-00000002 is damaged: its file x is missing; it is kept as step-00000002.damaged"
    assert fall_back(damaged) == line
    assert (checkpoints(tmp_path), (tmp_path / "step-00000002.damaged").is_dir()) == ([old], True)
    made(tmp_path, 2)
    assert fall_back(damaged).endswith("it is kept as step-00000002.damaged-2")
    with pytest.raises(
        DamagedCheckpoint, match="step-00000001: is damaged; give another checkpoint, or a whole copy of this one$"
    ):
        fall_back(DamagedCheckpoint("run", old, "is damaged", earlier_hint(old)))
    assert checkpoints(tmp_path) == [old]


def test_what_was_put_aside_can_be_put_back(tmp_path):
    paths = [made(tmp_path, step) for step in (1, 2, 3)]
    put_back(put_aside(tmp_path, after=1))
    assert checkpoints(tmp_path) == paths
    # A name that is in use again is not taken.
    renamed = put_aside(tmp_path, after=2)
    made(tmp_path, 3)
    put_back(renamed)
    assert [path.name for path in sorted(tmp_path.iterdir())][-1] == "step-00000003.aside"


def test_a_path_without_a_whole_checkpoint_is_refused(tmp_path):
    unfinished = made(tmp_path / "checkpoints", 1, whole=False)
    for path, rule in [
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "holds no complete"),
        (unfinished, "holds no"),
    ]:
        with pytest.raises(ConfigError, match=f"^checkpoint.load_from=.*{rule}.*; give "):
            find(str(path), "checkpoint.load_from")


def test_names_that_no_run_gives_are_passed_over(tmp_path):
    kept = made(tmp_path, 3)
    for name in ("step-abc", "step-", "step--4", "step-5.aside", "step-6.part", "step-²", "step-00000007.old"):
        made(tmp_path, 99).rename(tmp_path / name)
    (tmp_path / "step-00000008").write_text("")
    (tmp_path / "step-00000009").symlink_to(tmp_path / "nowhere")
    assert checkpoints(tmp_path) == [kept]


def test_of_a_symbolic_link_only_the_link_is_removed(tmp_path):
    elsewhere = made(tmp_path / "elsewhere", 4)
    link = step_folder(tmp_path, 4)
    link.symlink_to(elsewhere)
    assert latest(tmp_path) == link
    assert remove(link) is None
    assert not link.is_symlink()
    assert (elsewhere / "index.json").exists()


def test_whatever_stands_in_the_place_of_a_checkpoint_is_removed(tmp_path):
    folder, file, broken = made(tmp_path, 1), tmp_path / "step-00000002", tmp_path / "step-00000003"
    file.write_text("")
    broken.symlink_to(tmp_path / "nowhere")
    # A process has died while it removed this checkpoint before.
    (tmp_path / "step-00000001.gone.part").mkdir()
    for path in (folder, file, broken, tmp_path / "not there"):
        assert remove(path) is None
    assert list(tmp_path.iterdir()) == []


def test_later_ones_are_put_aside(tmp_path):
    for step in (2, 4, 6):
        made(tmp_path, step)
    assert [path.name for path in put_aside(tmp_path, after=2)] == ["step-00000004.aside", "step-00000006.aside"]
    assert latest(tmp_path) == step_folder(tmp_path, 2)
    made(tmp_path, 4)
    # What was put aside before stays.
    assert [path.name for path in put_aside(tmp_path, after=2)] == ["step-00000004.aside-2"]
    assert put_aside(tmp_path, after=2) == []


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
        read_contents(made(tmp_path, 1), "run").check_model(mine)


@pytest.mark.parametrize("name", ["index.json", "position.json"])
def test_a_file_that_the_disk_does_not_give_is_no_damage(tmp_path, monkeypatch, name):
    path, real = made(tmp_path, 1), os.open

    def refuse(file, *given):
        if os.path.basename(file) == name:
            raise PermissionError(13, "Permission denied")
        return real(file, *given)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=f"its file {name} cannot be read \\(Permission denied\\); give") as caught:
        read_contents(path, "run")
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_one_that_its_run_removes_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    path, real = made(tmp_path, 1), index.read_index

    def then_removed(*named):
        found = real(*named)
        remove(path)
        return found

    monkeypatch.setattr(index, "read_index", then_removed)
    with pytest.raises(DamagedCheckpoint, match=r"^run=.*: was removed while it was read; try again: its run keeps"):
        read_contents(path, "run")


def test_a_run_must_be_longer_than_what_it_starts_from(tmp_path):
    path = made(tmp_path, 5)
    contents = read_contents(path, "run")
    contents.check_step(6)
    with pytest.raises(ConfigError, match=r"^training.steps=5: the checkpoint .* is of step 5 already; try 10$"):
        contents.check_step(5)


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


def test_a_checkpoint_outside_of_a_run_is_no_run(tmp_path):
    step_folder(tmp_path, 4).mkdir()
    with pytest.raises(ConfigError, match="fits no run"):
        find_run_or_checkpoint(str(step_folder(tmp_path, 4)), tmp_path / "runs")


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


@pytest.mark.parametrize(
    ("place", "form", "step"),
    [
        *(("", f"{{run}}{rest}", step) for rest, step in (("", 8), ("/checkpoints", 8), ("/checkpoints/step-4", 4))),
        ("", "{run}/checkpoints/step-00000004", 4),
        # From within the run: its name was `/`.
        *[("", ".", 8), ("", "checkpoints/step-8", 8), ("checkpoints", "step-8", 8)],
    ],
)
def test_the_parent_is_named_by_its_sweep_and_folder(run, monkeypatch, place, form, step):
    monkeypatch.chdir(run.path / place)
    assert parent_of(form.format(run=run.path)) == {"parent_run": f"single/{run.path.name}", "parent_step": step}


@pytest.mark.parametrize(("name", "form"), [("step-00000003", "step-3"), ("best-of-three", "best-of-three")])
def test_a_checkpoint_outside_of_a_run_is_named_by_its_path(tmp_path, monkeypatch, name, form):
    """A copy has any name."""
    folder = saved(tmp_path / name, 3)
    monkeypatch.chdir(tmp_path)
    assert parent_of(str(folder)) == parent_of(form) == {"parent_run": str(folder), "parent_step": 3}


def test_a_checkpoint_that_is_gone_is_no_error(run, tmp_path):
    """A run that has begun may be submitted again when its parent has been removed."""
    assert parent_of(f"{run.path}/checkpoints/step-5") == {}
    assert parent_of(str(tmp_path / "gone")) == {}

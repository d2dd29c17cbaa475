"""Names of checkpoints, and which of them count."""

import pytest

from tests import tiny
from titanlab.checkpoint import (
    DamagedCheckpoint,
    check_checkpoint,
    earlier_hint,
    fall_back,
    find,
    latest,
    of_step,
    put_aside,
    put_back,
    remove,
)
from titanlab.checkpoint.folders import checkpoints, step_folder
from titanlab.checkpoint.schema import Sync
from titanlab.errors import ConfigError


def made(folder, step, *, whole=True, shapes=None):
    path = step_folder(folder, step)
    tiny.write_checkpoint(path, {"step": step, "parameters": shapes or {"a.weight": [2, 3]}})
    if not whole:
        (path / "index.json").unlink()
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


def test_one_that_has_lost_files_since_counts_and_is_found_damaged(tmp_path):
    for step, name in [(1, "index.json"), (2, "rank-00000.safetensors")]:
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / name).write_bytes(b"")
    assert checkpoints(tmp_path) == [step_folder(tmp_path, 1), step_folder(tmp_path, 2)]
    assert find(str(step_folder(tmp_path, 2)), "k") == step_folder(tmp_path, 2)


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


@pytest.mark.parametrize("name", ["every", "keep"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=f"^checkpoint.{name}=-1: must not be negative"):
        Sync(**{name: -1})


def test_names_that_no_run_gives_are_passed_over(tmp_path):
    kept = made(tmp_path, 3)
    for name in ("step-abc", "step-", "step--4", "step-5.aside", "step-6.part", "step-²", "step-00000007.old"):
        made(tmp_path, 99).rename(tmp_path / name)
    (tmp_path / "step-00000008").write_text("")
    (tmp_path / "step-00000009").symlink_to(tmp_path / "nowhere")
    assert checkpoints(tmp_path) == [kept]


def test_order_is_that_of_steps_however_they_are_written(tmp_path):
    short = made(tmp_path, 9)
    short.rename(tmp_path / "step-9")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9"]
    made(tmp_path, 10)
    made(tmp_path, 123_456_789)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-00000010", "step-123456789"]


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
    for path in (folder, file, broken, tmp_path / "not there"):
        assert remove(path) is None
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_be_removed_is_said(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert remove(made(tmp_path, 1)).strerror == "Permission denied"


def test_later_ones_are_put_aside(tmp_path):
    for step in (2, 4, 6):
        made(tmp_path, step)
    assert [path.name for path in put_aside(tmp_path, after=2)] == ["step-00000004.aside", "step-00000006.aside"]
    assert latest(tmp_path) == step_folder(tmp_path, 2)
    made(tmp_path, 4)
    # What was put aside before stays.
    assert [path.name for path in put_aside(tmp_path, after=2)] == ["step-00000004.aside-2"]
    assert put_aside(tmp_path, after=2) == []


def test_a_step_s_checkpoint(tmp_path):
    for step in (2, 4):
        made(tmp_path, step)
    assert of_step(tmp_path, 4, "--step", 4) == step_folder(tmp_path, 4)
    with pytest.raises(ConfigError, match="^--step=3: the run has no whole checkpoint of this step; it has 2, 4$"):
        of_step(tmp_path, 3, "--step", 3)
    with pytest.raises(ConfigError, match="it has none at all$"):
        of_step(tmp_path / "empty", 3, "--step", 3)


def test_the_advice_names_the_one_before(tmp_path):
    first, second = made(tmp_path, 2), made(tmp_path, 4)
    assert earlier_hint(first) == "give another checkpoint, or a whole copy of this one"
    assert earlier_hint(second) == f"give another checkpoint of the run: the one before it is {first}"


@pytest.mark.parametrize("form", ["{}/checkpoints/step-2", "{}/checkpoints/step-00000002/", "~/checkpoints/step-2"])
def test_forms_of_a_checkpoint_s_path(tmp_path, monkeypatch, form):
    wanted = made(tmp_path / "checkpoints", 2)
    made(tmp_path / "checkpoints", 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(form.format(tmp_path), "k") == wanted
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert find("step-2", "k").resolve() == wanted
    assert find("..", "k").name == "step-00000004"


def test_a_damaged_one_is_refused_with_the_one_before_it(tmp_path):
    made(tmp_path, 1)
    path = made(tmp_path, 2)
    (path / "position.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"its file position.json has other bytes .*the one before it is .*step-00000001$"
    ):
        check_checkpoint(path, {"a.weight": (2, 3)}, "run")

"""The folder of a checkpoint while it is written: made, named, and removed after an error."""

from __future__ import annotations

import errno

import pytest
import torch

from tests.checkpoint.one_process import ALONE
from titanlab.checkpoint import store as begun
from titanlab.checkpoint.store import give_name, make_part, remove_old, removed_after_errors
from titanlab.distributed import World

SECOND = World(rank=1, world=2, local_rank=1, device=torch.device("cpu"))


def step(folder, number, *names):
    """A folder of a step, with these files."""
    path = folder / f"step-{number:08d}"
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text(name)
    return path


def whole(folder, number):
    return step(folder, number, "index.json", "position.json")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_made_beside_its_name(tmp_path):
    folder = tmp_path / "checkpoints"
    part = make_part(folder, folder / "step-00000003")
    assert part == folder / "step-00000003.part"
    assert list(part.iterdir()) == []
    # Another one, with the folder of checkpoints there.
    make_part(folder, folder / "step-00000004")
    assert (folder / "step-00000004.part").is_dir()


def test_what_an_earlier_save_has_left_is_removed(tmp_path):
    whole(tmp_path, 1)
    (tmp_path / "step-00000002.part").mkdir()
    (tmp_path / "step-00000002.part" / "rank-00000.safetensors").write_text("half")
    make_part(tmp_path, tmp_path / "step-00000002")
    assert names(tmp_path) == ["step-00000001", "step-00000002.part"]
    assert names(tmp_path / "step-00000002.part") == []


def test_the_folder_of_a_run_is_not_made_anew(tmp_path):
    folder = tmp_path / "gone" / "checkpoints"
    with pytest.raises(FileNotFoundError):
        make_part(folder, folder / "step-00000001")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_checkpoints_is_an_error_that_names_it(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_text("mine")
    with pytest.raises(NotADirectoryError) as caught:
        make_part(folder, folder / "step-00000001")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOTDIR, str(folder))
    assert folder.read_text() == "mine"


def test_after_a_whole_block_the_folder_stays(tmp_path):
    part = step(tmp_path, 1, "x")
    with removed_after_errors(part, ALONE):
        pass
    assert names(part) == ["x"]


@pytest.mark.parametrize(("world", "left"), [(ALONE, []), (SECOND, ["step-00000001"])])
def test_after_an_error_rank_0_removes_the_folder(tmp_path, world, left):
    part = step(tmp_path, 1, "x")
    with pytest.raises(KeyError), removed_after_errors(part, world):
        raise KeyError
    assert names(tmp_path) == left


def test_a_full_disk_is_named_by_the_folder_of_checkpoints(tmp_path):
    part = step(tmp_path, 1)
    with pytest.raises(OSError, match="No space left") as caught, removed_after_errors(part, ALONE):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path)
    # Another error keeps the name that it has.
    with pytest.raises(FileNotFoundError) as other, removed_after_errors(part, ALONE):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "elsewhere")
    assert other.value.filename == "elsewhere"


def test_an_interruption_removes_nothing(tmp_path):
    part = step(tmp_path, 1, "x")
    with pytest.raises(KeyboardInterrupt), removed_after_errors(part, ALONE):
        raise KeyboardInterrupt
    assert names(part) == ["x"]


def test_a_whole_folder_gets_its_name_and_replaces_another(tmp_path):
    final = step(tmp_path, 1, "old")
    part = make_part(tmp_path, final)
    (part / "new").write_text("")
    give_name(part, final)
    assert names(tmp_path) == ["step-00000001"]
    assert names(final) == ["new"]
    # In a store the two are the same.
    give_name(final, final)
    assert names(final) == ["new"]


def test_a_checkpoint_that_cannot_be_replaced_is_an_error(tmp_path, monkeypatch):
    final = step(tmp_path, 1, "old")
    part = make_part(tmp_path, final)
    monkeypatch.setattr(begun, "remove", lambda path: OSError(errno.EACCES, "Permission denied", str(path)))
    with pytest.raises(PermissionError):
        give_name(part, final)
    assert names(tmp_path) == ["step-00000001", "step-00000001.part"]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (0, 0, [2, 4, 6, 8]),
        (1, 0, [8]),
        (4, 0, [2, 4, 6, 8]),
        (5, 0, [2, 4, 6, 8]),
        (1, 4, [4, 8]),
        (2, 2, [2, 4, 6, 8]),
    ],
)
def test_the_newest_are_kept_and_those_that_a_number_divides(tmp_path, keep, keep_every, left):
    for number in (2, 4, 6, 8):
        whole(tmp_path, number)
    # It is none.
    step(tmp_path, 1)
    remove_old(tmp_path, keep, keep_every, pytest.fail)
    assert names(tmp_path) == [f"step-{number:08d}" for number in [1, *left]]


def test_each_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        whole(tmp_path, number)
    lines = []
    monkeypatch.setattr(begun, "remove", lambda path: OSError("odd") if path.name.endswith("1") else None)
    remove_old(tmp_path, 1, 0, lines.append)
    assert lines == [f"the old checkpoint {tmp_path / 'step-00000001'} cannot be removed: odd"]

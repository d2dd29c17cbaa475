"""Folders that appear complete or not at all, and what is never replaced."""

from __future__ import annotations

import os

import pytest

from titanlab.errors import ConfigError
from titanlab.system import StoreFault
from titanlab.train import check_apart, check_target, whole_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def made(folder, *files):
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text(name)
    return folder


def is_ours(folder):
    return (folder / "ours").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_new_or_empty_folder_can_be_written(tmp_path, force):
    check_target(tmp_path / "new", is_ours, force=force)
    check_target(tmp_path / "a" / "b" / "new", is_ours, force=force)
    check_target(made(tmp_path / "empty"), is_ours, force=force)
    assert names(tmp_path) == ["empty"]


def test_a_folder_with_files_needs_force_and_must_be_ours(tmp_path):
    ours, other = made(tmp_path / "w", "ours"), made(tmp_path / "mine", "thesis")
    for folder in (ours, other):
        with pytest.raises(
            ConfigError, match=r"^--into=.*: exists; name another folder, or give --force to replace it$"
        ):
            check_target(folder, is_ours, force=False)
    check_target(ours, is_ours, force=True)
    with pytest.raises(ConfigError, match="holds something else than weights; name another folder$"):
        check_target(other, is_ours, force=True)
    with pytest.raises(ConfigError, match="exists"):
        check_target(other / "thesis", is_ours, force=False)


def test_a_folder_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=rf"cannot be written \({tmp_path}/file is no folder\); name a folder of yours$"
    ):
        check_target(tmp_path / "file" / "a" / "b", is_ours, force=True)


def test_a_folder_without_permission_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"cannot be written \(no permission\); name a folder of yours$"):
        check_target(tmp_path / "new", is_ours, force=False)


@pytest.mark.parametrize(("source", "into"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "b/../a"), ("link", "a")])
def test_what_is_read_is_not_written(tmp_path, source, into):
    made(tmp_path / "a" / "b")
    made(tmp_path / "b")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ConfigError, match="is the folder that is read, or lies in it; name another folder"):
        check_apart(tmp_path / source, tmp_path / into)


def test_folders_beside_each_other_are_apart(tmp_path):
    for into in ("b", "ab", "b/a"):
        check_apart(tmp_path / "a", tmp_path / into)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with whole_folder(tmp_path / "deep" / "new") as part:
        assert part == tmp_path / "deep" / "new.part"
        made(part / "conf", "x")
        assert names(tmp_path / "deep") == ["new.part"]
    assert names(tmp_path / "deep") == ["new"]
    assert names(tmp_path / "deep" / "new") == ["conf"]


def test_a_folder_that_is_there_is_replaced_at_the_end(tmp_path):
    folder = made(tmp_path / "w", "old")
    made(tmp_path / ".w.old", "older")
    with whole_folder(folder) as part:
        (part / "new").write_text("")
        assert names(folder) == ["old"]
    assert names(tmp_path) == ["w"]
    assert names(folder) == ["new"]


def test_what_a_killed_process_has_left_goes(tmp_path):
    made(tmp_path / "w.part" / "conf", "half")
    (tmp_path / "w.part" / "file").write_text("half")
    with whole_folder(tmp_path / "w") as part:
        assert names(part) == []
    assert names(tmp_path / "w") == []


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_after_an_error_nothing_is_left(tmp_path, error):
    folder = made(tmp_path / "w", "old")
    with pytest.raises(error), whole_folder(folder) as part:
        (part / "new").write_text("")
        raise error
    assert names(tmp_path) == ["w"]
    assert names(folder) == ["old"]


def test_a_full_disk_is_one_line(tmp_path):
    with pytest.raises(ConfigError) as caught, whole_folder(tmp_path / "w"):
        raise OSError(28, "No space left on device")
    cure = "name a folder of yours with room for it"
    assert str(caught.value) == f"--into={tmp_path}/w: cannot be written (No space left on device); {cure}"
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"cannot be written \(.*\); name a folder"),
        whole_folder(tmp_path / "file" / "w"),
    ):
        pytest.fail("it has no folder")


def test_a_store_that_is_down_while_it_is_read_is_not_blamed_on_the_folder_to_write(tmp_path):
    with pytest.raises(StoreFault), whole_folder(tmp_path / "w"):
        raise StoreFault("s3://bucket/run", "it does not answer")
    assert names(tmp_path) == []


def test_two_cannot_write_one_folder(tmp_path):
    with whole_folder(tmp_path / "w") as part:
        (part / "x").write_text("")
        with (
            pytest.raises(ConfigError, match="is being written by another process; wait for it$"),
            whole_folder(tmp_path / "w"),
        ):
            pytest.fail("the other one writes it")
        # The second one has removed nothing of the first.
        assert names(part) == ["x"]
    assert names(tmp_path / "w") == ["x"]

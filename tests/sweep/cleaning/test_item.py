"""What can be removed: its size, its age, and removal that leaves no root and follows no link."""

import os
import threading
import time

import pytest

from tests.sweep.made import Made
from titanlab.sweep import Refused, Removable, remove_item
from titanlab.sweep.clean import TEMPORARY, YOUNG_SECONDS, is_old, is_within, item, size_of_tree


@pytest.fixture
def run(tmp_path):
    return Made(tmp_path / "runs").run("a")


def test_paths_outside_the_root_are_refused(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    assert is_within(root / "a", root)
    assert not is_within(root, root)
    assert not is_within(tmp_path / "b", root)
    assert not is_within(root / ".." / "b", root)
    assert not is_within(root / "link" / "b", root)
    (tmp_path / "b").write_text("x")
    for path in (tmp_path / "b", root / "link" / "b"):
        with pytest.raises(Refused):
            remove_item(Removable(kind="temporary", path=path, root=root, bytes=1))
    remove_item(Removable(kind="temporary", path=root / "gone", root=root, bytes=1))
    assert (tmp_path / "b").exists()


def test_a_run_that_begins_meanwhile_is_left_alone(run):
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    checkpoint = run.checkpoints / "step-00000002"
    found = Removable(kind="checkpoints", path=checkpoint, root=run.path.parents[1], bytes=1, run=run)
    ready, done = threading.Event(), threading.Event()

    def work():
        with run.claim():
            ready.set()
            done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    with pytest.raises(Refused, match="is in the hands of"):
        remove_item(found)
    done.set()
    thread.join()
    assert checkpoint.is_dir()


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        (".status.json.7-0a1b2c3d.tmp", True),
        (".a.123-ff.removing", True),
        ("status.json.tmp", False),
        (".a.b.partial", False),
    ],
)
def test_names_of_temporary_files(name, matches):
    assert (TEMPORARY.fullmatch(name) is not None) is matches


def test_an_item_is_a_file_or_a_folder_within_its_root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_text("12345")
    (tmp_path / "root" / "link").symlink_to("a")
    (tmp_path / "root" / "dangling").symlink_to("nowhere")
    (tmp_path / "outside").write_text("1")
    root = tmp_path / "root"
    found = item("temporary", root / "a", root)
    assert found == Removable(kind="temporary", path=root / "a", root=root, bytes=5)
    for path in (root / "link", root / "dangling", root / "gone", tmp_path / "outside", root):
        assert item("temporary", path, root) is None


def test_the_size_is_that_of_files_and_links_count_nothing(tmp_path):
    folder = tmp_path / "a"
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "one").write_bytes(bytes(10))
    (folder / "b" / "c" / "two").write_bytes(bytes(7))
    (tmp_path / "large").write_bytes(bytes(1000))
    (folder / "link").symlink_to(tmp_path / "large")
    (folder / "b" / "up").symlink_to(folder, target_is_directory=True)
    assert size_of_tree(folder) == 17
    assert size_of_tree(folder / "one") == 10
    assert size_of_tree(folder / "link") == 0
    assert size_of_tree(tmp_path / "gone") == 0
    (tmp_path / "empty").mkdir()
    assert size_of_tree(tmp_path / "empty") == 0


def aged(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def test_what_was_not_written_to_for_an_hour_is_old(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "inner").write_text("")
    aged(folder / "inner", 2 * YOUNG_SECONDS)
    aged(folder, 2 * YOUNG_SECONDS)
    assert is_old(folder)
    assert not is_old(folder, now=time.time() - 1.5 * YOUNG_SECONDS)
    aged(folder / "inner", 0)
    assert not is_old(folder)
    assert not is_old(tmp_path / "gone")


def test_a_folder_is_removed_with_its_links_and_not_what_they_lead_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    remove_item(Removable(kind="temporary", path=tmp_path / "a", root=tmp_path, bytes=1))
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_what_has_become_a_link_is_refused(tmp_path):
    (tmp_path / "kept").write_text("x")
    found = Removable(kind="temporary", path=tmp_path / "a", root=tmp_path, bytes=1)
    (tmp_path / "a").symlink_to("kept")
    with pytest.raises(Refused, match="it is a link now, or lies elsewhere"):
        remove_item(found)
    assert sorted(os.listdir(tmp_path)) == ["a", "kept"]

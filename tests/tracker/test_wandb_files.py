"""wandb's files in the folder of a run: which belong to which start, and what becomes of replaced ones."""

from __future__ import annotations

import pytest

from titanlab.techniques.tracker.trackers_schema import Wandb
from titanlab.techniques.tracker.wandb import WandbTracker, discard, is_uploaded, offline_files, online_folders

kept_files, put_aside = WandbTracker(Wandb()).kept_files, WandbTracker(Wandb()).put_aside

FIRST, LATER = "offline-run-20260102_030405-x-1", "offline-run-20260103_030405-x-2"
ONLINE = "run-20260104_030405-x-1"


@pytest.fixture
def run(tmp_path):
    """A run with two offline starts and an online one, and what wandb puts beside them."""
    for name in (LATER, FIRST, ONLINE):
        folder = tmp_path / "wandb" / name
        (folder / "files").mkdir(parents=True)
        (folder / f"run-{name.split('-', 2)[-1]}.wandb").write_text(name)
        (folder / "files" / "output.log").touch()
    (tmp_path / "wandb" / "latest-run").symlink_to(LATER)
    (tmp_path / "wandb" / "debug.log").touch()
    return tmp_path


def names(paths):
    return [path.name for path in paths]


def test_online_starts_are_found_by_the_runs_id(run):
    (run / "wandb" / "run-20260105_030405-another").mkdir()
    assert names(online_folders(run, "x-1")) == [ONLINE]
    assert online_folders(run, "x-2") == frozenset()


def test_files_of_offline_starts_are_listed_oldest_first(run):
    assert [file.parent.name for file in offline_files(run)] == [FIRST, LATER]
    assert {file.suffix for file in offline_files(run)} == {".wandb"}


def test_a_file_is_uploaded_once_wandb_has_marked_it(run):
    first, later = offline_files(run)
    first.with_name(f"{first.name}.synced").touch()
    assert (is_uploaded(first), is_uploaded(later)) == (True, False)
    # The mark is no file of rows.
    assert offline_files(run) == [first, later]


def test_folders_of_all_starts_are_kept_and_nothing_else(run):
    (run / "wandb" / "run-20260105_030405-file").touch()
    (run / "wandb" / "run-20260106_030405-link").symlink_to(run / "wandb" / FIRST)
    assert sorted(names(kept_files(run))) == sorted([FIRST, LATER, ONLINE])


def test_a_run_without_wandb_has_no_files(tmp_path):
    assert offline_files(tmp_path) == []
    assert kept_files(tmp_path) == online_folders(tmp_path, "x-1") == frozenset()


def test_replaced_folders_are_put_aside_whole(run):
    put_aside(run, [run / "wandb" / FIRST], keep=True)
    # A second one goes beside the first.
    put_aside(run, [run / "wandb" / ONLINE], keep=True)
    assert names(kept_files(run)) == [LATER]
    aside = run / "replaced" / "wandb"
    assert sorted(names(aside.iterdir())) == sorted([FIRST, ONLINE])
    assert (aside / FIRST / "files" / "output.log").is_file()
    put_aside(run, [], keep=True)


def test_folders_that_nobody_keeps_are_removed(run):
    put_aside(run, [run / "wandb" / FIRST, run / "wandb" / "gone"], keep=False)
    assert sorted(names(kept_files(run))) == sorted([LATER, ONLINE])
    assert not (run / "replaced").exists()
    discard([run / "wandb" / LATER])
    assert names(kept_files(run)) == [ONLINE]

"""checkpoint=sync and checkpoint=off: a save is on the disk when it returns, or there is none."""

from __future__ import annotations

from tests.checkpoint.targets import saved_by
from titanlab.checkpoint import OnlyModel, Position
from titanlab.checkpoint.folders import checkpoints
from titanlab.checkpoint.store import NoSaver, SyncSaver


def test_some_checkpoints_are_kept_for_good(tmp_path, target):
    saver = SyncSaver(target(keep=1, keep_every=4))
    for step in range(2, 12, 2):
        saved_by(saver, step=step)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{step:08d}" for step in (4, 8, 10)]


def test_a_save_is_complete_when_it_returns(tmp_path, target):
    steps = []
    saver = SyncSaver(target(saved=steps.append))
    saver.save(Position(step=3))
    assert (saver.saved_step, saver.is_done, steps) == (3, False, [3])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    saver.save_last(Position(step=4), OnlyModel(dtype="bfloat16"))
    assert (saver.saved_step, steps) == (4, [3, 4])
    # Both return at once: there is no copy and no thread.
    saver.before_update()
    saver.wait()


def test_without_checkpoints_nothing_is_saved(tmp_path):
    saver = NoSaver()
    saved_by(saver)
    saver.before_update()
    saver.save_last(Position(step=2), OnlyModel())
    assert (saver.saved_step, saver.is_done) == (0, False)
    assert list(tmp_path.iterdir()) == []

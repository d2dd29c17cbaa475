"""What a tracker lacks of a run is said, and written anew from metrics.jsonl."""

import dataclasses

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.sweep.made import Made, begin, end
from tests.tracker.test_wandb import inspect
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.techniques.tracker import wandb
from titanlab.techniques.tracker.contract import FINISHED, OPEN, RECORD_FILE, Record, read_record, write_record
from titanlab.techniques.tracker.trackers_schema import TensorBoard, Wandb
from titanlab.techniques.tracker.wandb import offline_files
from titanlab.train import rebuild, tracker_gap
from titanlab.train.tracking import RebuildError


def tracked(made, config, name="fsdp", steps=6, **given):
    """A run with an attempt whose tracker was cut off; steps 1 to 6 are in metrics.jsonl."""
    run = made.run(name, shard=2)
    again(run, config, range(1, steps + 1), **given)
    return run


def again(run, config, steps, *, resumed_step=0, **record):
    """Another attempt, from a step on."""
    attempt = begin(run, tracker=dataclasses.asdict(config))
    with run.open_metrics(attempt, resumed_step=resumed_step) as metrics:
        for step in steps:
            metrics.write("train", step, {meter.LOSS: 10.0 * attempt + step, meter.MFU: None})
        metrics.write("validation", step, {meter.VALIDATION_LOSS: float(attempt)})
    kind = config.kind
    record = {"kind": kind, "state": OPEN, "id": run.identity().tracker_id, "step": 2, "attempt": attempt, **record}
    write_record(run.attempt_folder(attempt) / RECORD_FILE, Record(**record))


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    return Made(tmp_path / "runs")


@pytest.mark.full
def test_wandbs_file_of_a_run_that_was_resumed(made):
    run = tracked(made, Wandb(), wanted="online")
    again(run, Wandb(), range(5, 11), resumed_step=4, wanted="online")
    end(run)
    cut = run.path / "wandb" / f"offline-run-20260101_000000-{run.identity().tracker_id}"
    cut.mkdir(parents=True)
    (cut / "run-x.wandb").write_text("")
    assert tracker_gap(run) == (
        f"wandb: has at least the steps up to 2 of 10; titanlab sync --rebuild runs/layouts/{run.path.name}"
    )
    for _ in range(2):
        (record,) = rebuild(run)
        records = inspect(run.path)
        opened = next(each["run"] for each in records if each["type"] == "run")
        assert (opened["run_id"], opened["display_name"]) == (run.identity().tracker_id, run.path.name)
        rows = [each["history"]["item"] for each in records if each["type"] == "history"]
        # What the second attempt went over again counts as it did then.
        assert [row["_step"] for row in rows] == list(range(1, 11))
        assert [row[meter.LOSS] for row in rows] == [
            *(10.0 + step for step in range(1, 5)),
            *(20.0 + step for step in range(5, 11)),
        ]
        assert rows[-1][meter.VALIDATION_LOSS] == 2.0
        times = {row["step"]: row["time"] for row in run.metrics("train")}
        assert [row["_timestamp"] for row in rows[:-1]] == [times[step] for step in range(1, 10)]
        summary = {}
        for each in records:
            summary |= each.get("summary", {}).get("update", {})
        assert (summary["outcome"], summary[meter.TOKENS_PER_SECOND]) == ("done", 1000.0)
        # The machine that writes it anew is not the run's.
        assert not [each for each in records if each["type"] == "stats"]
        assert (record.state, record.rebuilt, record.attempt) == (FINISHED, True, 2)
        # One file is left to upload, and what was there before is kept once.
        assert [file.parent.name for file in offline_files(run.path)] == [record.folder.removeprefix("wandb/")]
        assert [path.name for path in (run.path / "replaced" / "wandb").iterdir()] == [cut.name]
    assert tracker_gap(run) == (f"wandb: written offline, not uploaded; titanlab sync runs/layouts/{run.path.name}")
    (file,) = offline_files(run.path)
    file.with_name(f"{file.name}.synced").touch()
    assert tracker_gap(run) is None
    # An attempt after that stands for itself.
    again(run, Wandb(), [11], resumed_step=10)
    assert "sync --rebuild" in tracker_gap(run)


def test_event_files_of_tensorboard(made):
    run = tracked(made, TensorBoard())
    end(run, "crash", step=6)
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard" / "events.out.tfevents.1.host.1.0").write_text("")
    assert tracker_gap(run).startswith("tensorboard: has at least the steps up to 2 of 6; ")
    for _ in range(2):
        rebuild(run)
        events = EventAccumulator(str(run.path / "tensorboard"))
        events.Reload()
        rows = events.Scalars(meter.LOSS)
        assert [(row.step, row.value) for row in rows] == [(step, 10.0 + step) for step in range(1, 7)]
        assert [row.wall_time for row in rows] == [row["time"] for row in run.metrics("train")]
        assert len(list((run.path / "tensorboard").iterdir())) == 1
        assert [path.name for path in (run.path / "replaced" / "tensorboard").iterdir()] == [
            "events.out.tfevents.1.host.1.0"
        ]
    assert tracker_gap(run) is None


def test_counts_of_experts_are_no_metrics(made):
    run = tracked(made, TensorBoard())
    with run.open_metrics(1) as metrics:
        metrics.write("experts", 6, {"steps": 5, "counts": [[3, 4], [5, 2]]})
    end(run)
    rebuild(run)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert meter.LOSS in events.Tags()["scalars"]
    assert not {"steps", "counts"} & {*events.Tags()["scalars"]}
    assert run.metrics("experts")


def test_a_tracker_that_cannot_be_written_leaves_what_there_was(made, monkeypatch):
    run = tracked(made, Wandb())
    cut = run.path / "wandb" / "offline-run-20260101_000000-x"
    cut.mkdir(parents=True)
    monkeypatch.setattr(wandb, "_WRITER", "titanlab.no_such_module")
    with pytest.raises(RebuildError, match="has ended by itself"):
        rebuild(run)
    assert list((run.path / "wandb").iterdir()) == [cut]
    assert read_record(run.path / RECORD_FILE) is None
    assert "sync --rebuild" in tracker_gap(run)


def test_what_cannot_be_rebuilt(made):
    plain = made.run("plain")
    begin(plain)
    with pytest.raises(ConfigError, match=r"^tracker=jsonl: writes nothing besides metrics\.jsonl"):
        rebuild(plain)
    empty = made.run("empty", seed=1)
    begin(empty, tracker=dataclasses.asdict(Wandb()))
    with pytest.raises(ConfigError, match=r"has no rows in metrics\.jsonl"):
        rebuild(empty)
    run = tracked(made, Wandb(), name="other")
    with run.claim(), pytest.raises(ConfigError, match="is locked by process"):
        rebuild(run)

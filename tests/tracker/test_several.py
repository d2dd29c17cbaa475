"""tracker=[…]: rows reach every tracker, and the failure of one reaches nobody else."""

import dataclasses
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import tiny
from tests.sweep.made import Made, end
from tests.tracker.test_wandb import inspect
from tests.train.recording.test_rebuild import again
from titanlab.errors import ConfigError
from titanlab.options import PLUS, combination
from titanlab.recipe import from_mapping, to_mapping
from titanlab.techniques.tracker.contract import FINISHED, OPEN, TrackedRun, open_tracker, records_in
from titanlab.techniques.tracker.tensorboard import TensorBoardTracker
from titanlab.techniques.tracker.trackers_schema import Jsonl, JsonlTracker, TensorBoard, Wandb
from titanlab.train import rebuild, tracker_gap


def several(**configs):
    made = combination("tracker", PLUS.join(configs))
    return made.schema(**configs)


@pytest.fixture
def run(tmp_path):
    for folder in ("logs", "attempts/1"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    return TrackedRun(id="a-1", name="toy", sweep="layouts", folder=tmp_path / "run", config={}, layout={"shard": 2})


def both():
    return several(wandb=Wandb(mode="offline", finish_seconds=120), tensorboard=TensorBoard())


def losses_of_tensorboard(run):
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    return [(row.step, row.value) for row in events.Scalars("loss")]


# Each by itself, and what one that raises costs the other, are in `make test`.
@pytest.mark.full
@pytest.mark.covering
def test_each_has_all_rows_and_a_record(run):
    told = []
    tracker = open_tracker(both(), run, warn=told.append)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0 / step})
    tracker.finish({"loss": 0.5})
    assert told == []
    rows = [record["history"]["item"] for record in inspect(run.folder) if record["type"] == "history"]
    assert [(row["_step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5)]
    assert losses_of_tensorboard(run) == [(1, 1.0), (2, 0.5)]
    records = records_in(run.folder / "attempts" / "1")
    assert {kind: (record.state, record.step, record.id) for kind, record in records.items()} == {
        "wandb": (FINISHED, 2, "a-1"),
        "tensorboard": (FINISHED, 2, "a-1"),
    }
    assert len(tracker.kept_files(run.folder)) == 2


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_one_that_raises_stops_alone(run, monkeypatch, method):
    def broken(*_, **__):
        raise RuntimeError("planted")

    rows = []
    monkeypatch.setattr(TensorBoardTracker, method, broken)
    monkeypatch.setattr(JsonlTracker, "log", lambda self, step, metrics, *, time=None: rows.append(step))
    monkeypatch.setattr(JsonlTracker, "finish", lambda self, summary, *, exit_code=0: rows.append(exit_code))
    told = []
    tracker = open_tracker(several(tensorboard=TensorBoard(), jsonl=Jsonl()), run, warn=told.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({}, exit_code=70)
    assert told == ["tensorboard stopped (RuntimeError: planted); metrics.jsonl goes on"]
    assert rows == [1, 70]


def test_it_can_be_frozen_and_is_no_part_of_the_identity(tmp_path):
    recipe = dataclasses.replace(tiny.recipe(tmp_path), tracker=both())
    frozen = json.loads(json.dumps(to_mapping(recipe)))
    assert frozen["tracker"]["kind"] == "wandb+tensorboard"
    again = from_mapping(frozen)
    assert again.tracker.parts() == {"wandb": both().wandb, "tensorboard": TensorBoard()}
    assert type(again.tracker) is type(recipe.tracker)


def test_two_of_a_kind_and_odd_names_are_refused():
    with pytest.raises(ConfigError, match=r"^tracker=\[wandb,mine\]: has two trackers of kind wandb: wandb and mine; "):
        several(wandb=Wandb(), mine=Wandb(project="mine")).check(None)
    with pytest.raises(ConfigError, match=r"^tracker=\[wandb,wandb\]: names wandb twice; "):
        combination("tracker", "wandb+wandb")
    with pytest.raises(ConfigError, match=r"^tracker=\[wandb,my-own\]: 'my-own' is not a word; "):
        combination("tracker", "wandb+my-own")
    assert combination("precision", "bf16+fp32") is None


def test_what_each_lacks_is_said_and_written_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Made(tmp_path / "runs")
    run = made.run("fsdp", shard=2)
    again(run, both(), range(1, 4))
    record = json.loads((run.attempt_folder(1) / "tracker.json").read_text())
    (run.attempt_folder(1) / "tracker.json").unlink()
    for kind, state in (("wandb", OPEN), ("tensorboard", OPEN)):
        text = json.dumps({**record, "kind": kind, "state": state, "wanted": None})
        (run.attempt_folder(1) / f"tracker-{kind}.json").write_text(text)
    end(run)
    place = f"titanlab sync --rebuild runs/layouts/{run.path.name}"
    assert tracker_gap(run) == (
        f"tensorboard: has at least the steps up to 2 of 3; {place} · "
        f"wandb: has at least the steps up to 2 of 3; {place}"
    )
    assert {record.kind: record.state for record in rebuild(run)} == {
        "wandb": FINISHED,
        "tensorboard": FINISHED,
    }
    assert sorted(records_in(run.path)) == ["tensorboard", "wandb"]
    assert tracker_gap(run) is None


# tracker=tensorboard by itself


def a_run(folder, **given):
    return TrackedRun(
        id="abcd", name="toy", sweep="single", folder=folder, config={"a": 1}, layout={"shard": 2}, **given
    )


def read(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_rows_and_summary_come_out_as_they_went_in(tmp_path):
    told = []
    tracker = open_tracker(TensorBoard(), a_run(tmp_path), warn=told.append)
    for step in (1, 2):
        tracker.log(step, {"loss_metrics/global_avg_loss": 5.0 - step, "mfu(%)": None, "note": "text"})
    tracker.finish({"throughput(tps)": 7.0, "peak_source": "datasheet", "mfu(%)": None})
    events = read(tmp_path)
    assert [(row.step, row.value) for row in events.Scalars("loss_metrics/global_avg_loss")] == [(1, 4.0), (2, 3.0)]
    tags = events.Tags()
    assert sorted(tags["scalars"]) == ["loss_metrics/global_avg_loss", "summary/throughput(tps)"]
    recipe = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"layout.shard": 2' in recipe
    assert told == []


def test_a_resumed_run_hides_the_rows_that_no_longer_count(tmp_path):
    first = open_tracker(TensorBoard(), a_run(tmp_path), warn=pytest.fail)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": 1.0})
    first.finish({})
    # TensorBoard reads files in the order of their names, and these begin with the second in which a file was opened.
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.1000000000.earlier"))
    second = open_tracker(TensorBoard(), a_run(tmp_path, attempt=2, resumed_step=2), warn=pytest.fail)
    second.log(3, {"loss": 2.0})
    second.finish({})
    assert [(row.step, row.value) for row in read(tmp_path).Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_trouble_costs_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    told = []
    tracker = open_tracker(TensorBoard(), a_run(tmp_path), warn=told.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert len(told) == 1
    assert told[0].startswith("tensorboard stopped (")

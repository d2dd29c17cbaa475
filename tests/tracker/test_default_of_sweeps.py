"""What a sweep records to if nothing chooses a tracker: files of wandb, written when a run has ended."""

import importlib.util
import os
import shutil

import pytest

from tests.cli.test_sync import offline
from tests.installed_command import titanlab
from tests.sweep.files import plan, sweep_text, write_sweep
from tests.sweep.made import Made, begin, end
from tests.tracker.test_wandb import inspect
from tests.until import until
from titanlab.cli import main
from titanlab.costs import meter
from titanlab.recipe import conf_folder
from titanlab.report.wandb_workspace import RESIDENT
from titanlab.sweep import SweepFolder, config_differences
from titanlab.techniques.tracker.trackers_schema import Wandb, choice_for_sweeps
from titanlab.train import is_due

POINTS = ("training.steps=20,30", "data=synthetic")


def tracker_of(*arguments):
    (tracker,) = {run.recipe.tracker for run in plan(*arguments).planned}
    return tracker


def test_it_is_wandb_at_the_end_of_runs_and_their_names_stay(monkeypatch):
    without = plan(*POINTS)
    monkeypatch.delenv("WANDB_MODE")
    study = plan(*POINTS)
    assert {run.recipe.tracker for run in study.planned} == {Wandb(mode="at_end")}
    assert {run.recipe.tracker.kind for run in without.planned} == {"jsonl"}
    assert [run.identity for run in study.planned] == [run.identity for run in without.planned]
    # What was not typed is not among what was.
    assert (study.name, study.definition) == (without.name, without.definition)
    assert tracker_of(*POINTS, "tracker.mode=online") == Wandb(mode="online")


def test_what_chooses_a_tracker_wins(tmp_path, monkeypatch):
    tracker = "tensorboard"
    monkeypatch.delenv("WANDB_MODE")
    file = sweep_text({"product": {"training.steps": [20, 30]}})
    chosen = file.replace("defaults:\n", f"defaults:\n  - override /tracker: {tracker}\n")
    assert tracker_of(*write_sweep(tmp_path, chosen)).kind == tracker
    points = plan("data=synthetic", f"tracker={tracker},wandb").planned
    assert [run.recipe.tracker.kind for run in points] == [tracker]


def test_an_option_that_is_swept_or_a_config_of_the_users_own_may_choose_too(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    for group, name, line in (("mine", "a", "override /tracker: tensorboard"), ("mine", "b", "override /ac: full")):
        (tmp_path / group).mkdir(exist_ok=True)
        text = f"# @package _global_\ndefaults:\n  - {line}\n  - override /data: synthetic\n"
        (tmp_path / group / f"{name}.yaml").write_text(text)
    given = [f"--config-dir={tmp_path}", "training.steps=20", "optimizer.schedule.warmup_steps=2"]
    points = plan(*given, "+mine=a,b").planned
    assert [run.recipe.tracker.kind for run in points] == ["tensorboard", "jsonl"]
    assert tracker_of(*given, "+mine=b", "seed=0,1") == Wandb(mode="at_end")
    own = tmp_path / "own"
    shutil.copytree(conf_folder(), own)
    config = own / "config.yaml"
    config.write_text(config.read_text().replace("tracker: jsonl", "tracker: tensorboard"))
    assert tracker_of(*POINTS, f"--config-path={own}").kind == "tensorboard"


def test_a_run_of_a_sweep_composes_to_the_same_again(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    made = Made(tmp_path / "runs")
    run = made.run("a", seed=1)
    definition = {"overrides": ["data=synthetic", "optimizer.schedule.warmup_steps=2"], "space": {"zip": {"seed": [1]}}}
    made.folder.write_manifest(definition, [{"point": {"seed": 1}, "run": run.path.name}])
    changes = {key: now for key, _, now in config_differences(run, {})}
    assert (changes["tracker.mode"], changes["profiler.kind"]) == ("at_end", "breakdown")
    assert "seed" not in changes
    made.folder.write_manifest({**definition, "space": None}, [{"point": {}, "run": run.path.name}])
    assert "tracker.mode" not in {key for key, *_ in config_differences(run, {})}


def test_the_environment_and_what_is_installed_decide(monkeypatch):
    assert choice_for_sweeps({}) == choice_for_sweeps({"WANDB_MODE": "offline"}) == ("wandb_at_end", ())
    assert choice_for_sweeps({"WANDB_API_KEY": "x"}) == ("wandb_at_end", ())
    assert choice_for_sweeps({"WANDB_MODE": "online"}) == ("wandb", ())
    assert choice_for_sweeps({"WANDB_MODE": "disabled"}) == ("jsonl", ())
    monkeypatch.delenv("WANDB_MODE")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else found(name, *more)
    )
    study = plan(*POINTS)
    assert {run.recipe.tracker.kind for run in study.planned} == {"jsonl"}
    assert len([line for line in study.notices if "wandb" in line]) == 1


def test_sync_writes_what_a_stopped_run_has_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Made(tmp_path / "runs")
    run = made.run("fsdp", shard=2)
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("tracker:\n  kind: jsonl\n", "tracker: {kind: wandb, mode: at_end}\n"))
    attempt = begin(run, tracker={"kind": "wandb", "mode": "at_end"})
    with run.open_metrics(attempt, resumed_step=0) as metrics:
        metrics.write("train", 1, {meter.LOSS: 3.0})
    assert main(["sync", "layouts"]) == 0
    assert "there is nothing to upload" in capsys.readouterr().out
    end(run, "cancelled")
    assert main(["sync", "layouts"]) == 2
    assert "WANDB_API_KEY" in capsys.readouterr().err
    opened = next(record["run"] for record in inspect(run.path) if record["type"] == "run")
    assert opened["run_group"] == "layouts"
    # It is not written again.
    (file,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    assert main(["sync", "layouts"]) == 2
    assert list(run.path.glob("wandb/offline-run-*/run-*.wandb")) == [file]


def test_a_sweep_that_has_ended_says_how_to_upload_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = Made(tmp_path / "runs")
    _, file = offline(made, "a")
    line = "in wandb: titanlab sync layouts, then titanlab workspace layouts\n"
    for verb in ("status", "collect"):
        assert main([verb, "layouts"]) == 0
        assert line in capsys.readouterr().out
    file.with_name(f"{file.name}.synced").touch()
    assert main(["status", "layouts"]) == 0
    assert line not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.covering
def test_each_run_of_a_sweep_has_throughput_memory_and_mfu_in_wandb(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    words = ["train", "-m", "+recipe=quickstart", "data=synthetic", "seed=0,1"]
    words += ["model=debug", "world=1", "parallelism=single", "training.steps=6", "training.log_every=1", "sweep=two"]
    words += ["training.validate_every=0", "optimizer.schedule.warmup_steps=1", "checkpoint=off"]
    words += ["notes=a, b", "cluster.peak_tflops=1"]
    said = titanlab(*words, folder=tmp_path, environ=environ, seconds=600)
    assert said.endswith("in wandb: titanlab sync two, then titanlab workspace two\n")
    runs = SweepFolder(tmp_path / "runs" / "two").runs()
    assert len(runs) == 2
    # The command ends when all results are there: the last run may still be writing its file.
    until(lambda: not any(map(is_due, runs)), 60)
    for run in runs:
        records = inspect(run.path)
        opened = next(record["run"] for record in records if record["type"] == "run")
        assert (opened["run_group"], opened["notes"]) == ("two", "a, b")
        summary = {}
        for record in records:
            summary |= record.get("summary", {}).get("update", {})
        result = run.result().metrics
        for name in (meter.TOKENS_PER_SECOND, meter.MFU, RESIDENT, meter.LOSS):
            assert summary[name] == result[name] > 0
        assert len([record for record in records if record["type"] == "history"]) >= 6

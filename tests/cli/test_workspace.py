"""`titanlab workspace`: what is printed, what is saved, and whose project it is."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.report.test_wandb_workspace import keys_of
from tests.sweep.made import Made, begin, end
from titanlab.cli import main
from titanlab.report import wandb_workspace
from titanlab.system import import_quietly


def track(run, text):
    """The tracker of a run, as its config.yaml has it."""
    config = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(config.replace("tracker:\n  kind: jsonl\n", f"tracker:\n{text}"))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    made = Made(tmp_path / "runs")
    for degree in (1, 2):
        run = made.run(f"tp{degree}", tensor=degree)
        tracker = {"kind": "wandb+tensorboard", "wandb": {"kind": "wandb", "project": "ours", "entity": "us"}}
        begin(run, tracker=tracker)
        track(run, "  kind: wandb\n  project: ours\n  entity: us\n")
        end(run)
    return "layouts"


def test_without_a_key_it_is_printed(sweep, capsys):
    assert main(["workspace", sweep]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "warning: no API key of wandb was found, so nothing is saved; WANDB_API_KEY or `wandb login` has one\n"
    )
    assert json.loads(said.out)["workspace"]["project"] == "ours"
    assert keys_of(said.out)["config"] == {"layout.value.label", "layout.value.tensor", "world.value"}
    assert main(["workspace", sweep, "--json", "--project", "other"]) == 0
    said = capsys.readouterr()
    assert (said.err, json.loads(said.out)["report"]["project"]["name"]) == ("", "other")


def test_with_a_key_both_are_saved(sweep, capsys, monkeypatch, shown):
    saved = []

    def save(self):
        saved.append(type(self).__name__)
        return SimpleNamespace(url=f"https://wandb.test/{self.entity}/{type(self).__name__}")

    for module, name in (("workspaces", "Workspace"), ("reports.v2", "Report")):
        monkeypatch.setattr(getattr(import_quietly(f"wandb_workspaces.{module}"), name), "save", save)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("titanlab.techniques.tracker.wandb.lack", lambda: None)
    assert shown("workspace", sweep) == "https://wandb.test/us/Workspace\nhttps://wandb.test/us/Report\n"

    def refuse(self):
        raise ValueError("permission denied\nand more")

    monkeypatch.setattr(import_quietly("wandb_workspaces.workspaces").Workspace, "save", refuse)
    assert main(["workspace", sweep]) == 1
    assert capsys.readouterr().err == ("error: wandb has not saved the workspace (ValueError: permission denied)\n")


def test_no_network_and_no_package_are_a_line(sweep, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["workspace", sweep]) == 2
    assert capsys.readouterr().err.startswith("error: WANDB_BASE_URL=http://127.0.0.1:9: cannot be reached (")
    monkeypatch.setattr(wandb_workspace.importlib.util, "find_spec", lambda name: None)
    assert main(["workspace", sweep]) == 2
    assert capsys.readouterr().err == (
        "error: verb=workspace: needs the package wandb-workspaces, which is not installed; "
        "pip install 'titanlab[wandb-workspaces]'\n"
    )
    assert main(["workspace", "nothing"]) == 2


SEVERAL = (
    "  kind: tensorboard+wandb\n  tensorboard:\n    kind: tensorboard\n"
    "  wandb:\n    kind: wandb\n    project: both\n    entity: them\n"
)


@pytest.mark.parametrize(
    ("trackers", "project", "entity"),
    # Of the first run that has one.
    [([None, SEVERAL], "both", "them"), ([None, None], "titanlab", ""), ([], "titanlab", "")],
)
def test_project_and_user_are_those_of_a_run_that_wrote_to_wandb(
    tmp_path, monkeypatch, capsys, trackers, project, entity
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    made = Made(tmp_path / "runs")
    made.drop("rule", "no", seed=9)
    for number, text in enumerate(trackers):
        run = made.run(f"r{number}", seed=number)
        if text is not None:
            track(run, text)
    assert main(["workspace", "layouts", "--json"]) == 0
    workspace = json.loads(capsys.readouterr().out)["workspace"]
    assert (workspace["project"], workspace["entity"]) == (project, entity)


@pytest.mark.parametrize("text", ["tracker: 3", "tracker: [wandb]"])
def test_a_damaged_tracker_of_one_run_hides_no_other(sweep, capsys, text):
    """It was a traceback."""
    path = min(path for path in (Path("runs") / sweep).iterdir() if path.is_dir()) / "config.yaml"
    path.write_text(re.sub(r"tracker:\n(  .*\n)+", f"{text}\n", path.read_text()))
    assert main(["workspace", sweep, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["workspace"]["project"] == "ours"
    assert err.startswith(f"warning: {path.parent.name} is left alone: tracker=")
    assert err.count("\n") == 1

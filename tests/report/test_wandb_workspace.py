"""The wandb workspace and report of a sweep: their panels, what is printed, and what is saved."""

import json
from types import SimpleNamespace

import pytest

from tests.sweep.made import Made, begin, end
from titanlab.cli import main
from titanlab.costs import meter
from titanlab.report import wandb_workspace
from titanlab.report.wandb_workspace import RESIDENT, json_text, view_of
from titanlab.system.quiet_import import import_quietly

ROWS = [
    {"accelerator": "cpu", "layout.tensor": 1, "layout.shard": 2, "layout.pipeline": 1},
    {"accelerator": "cpu", "layout.tensor": 2, "layout.shard": 1, "layout.pipeline": 1},
    {"accelerator": None, "layout.tensor": None},
]


def view(**given):
    return view_of("layouts", ROWS, **{"tracker": {}, "project": None, "entity": None, **given})


def panels(text):
    """The configs of the workspace's panels by their kind, and those of the report's."""
    both = json.loads(text)
    sections = both["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    grids = [block["metadata"] for block in both["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    found = [panel for section in sections for panel in section["panels"]]
    shown = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    return [{panel["viewType"]: panel["config"] for panel in each} for each in (found, shown)]


def keys_of(text):
    """All keys that the panels of the workspace read: of the config, of the summary, and of the rows."""
    panel, _ = panels(text)
    columns = [column["accessor"] for column in panel["Parallel Coordinates Plot"]["columns"]]
    scatter = panel["Scatter Plot"]
    line = panel["Run History Line Plot"]
    named = [*columns, scatter["xAxis"], scatter["yAxis"], f"config:{panel['Bar Chart']['groupBy']}"]
    named += [f"summary:{name}" for name in panel["Bar Chart"]["metrics"]]
    by_kind = {
        kind: {name.partition(":")[2] for name in named if name.startswith(kind)} for kind in ("config", "summary")
    }
    return {**by_kind, "rows": {line["xAxis"], *line["metrics"]}}


def test_panels_of_both():
    text = json_text(view(project="p", entity="e"))
    workspace, report = panels(text)
    assert workspace.keys() == {"Bar Chart", "Scatter Plot", "Run History Line Plot", "Parallel Coordinates Plot"}
    assert report == workspace
    assert keys_of(text) == {
        # wandb writes a step into a mapping as `.value.`; only axes that differ have a column.
        "config": {"layout.value.label", "layout.value.tensor", "layout.value.shard"},
        "summary": {meter.TOKENS_PER_SECOND, meter.MFU, RESIDENT},
        "rows": {meter.TOKENS_SEEN, meter.LOSS, meter.VALIDATION_LOSS},
    }
    both = json.loads(text)
    assert (both["workspace"]["project"], both["workspace"]["entity"]) == ("p", "e")
    (runs,) = both["workspace"]["spec"]["section"]["runSets"]
    assert [(rule["key"]["name"], rule["value"]) for rule in runs["filters"]["filters"]] == [("group", "layouts")]


def test_project_and_memory_are_those_of_the_runs(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert (view().project, view().entity) == ("titanlab", "")
    tracker = {"project": "ours", "entity": "us", "group": "mine"}
    assert [getattr(view(tracker=tracker), name) for name in ("project", "entity", "sweep")] == ["ours", "us", "mine"]
    assert view(tracker=tracker, project="given").project == "given"
    rows = [{"accelerator": "cuda", "layout.tensor": 8}]
    on_gpu = view_of("layouts", rows, tracker={}, project=None, entity=None)
    assert (on_gpu.memory, on_gpu.axes[0]) == (meter.MEMORY_RESERVED, "pipeline")


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
        config = (run.path / "config.yaml").read_text()
        text = "tracker:\n  kind: wandb\n  project: ours\n  entity: us\n"
        (run.path / "config.yaml").write_text(config.replace("tracker:\n  kind: jsonl\n", text))
        end(run)
    return "layouts"


def test_without_a_key_it_is_printed(sweep, capsys):
    assert main(["workspace", sweep]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "warning: no API key of wandb was found, so nothing is saved; WANDB_API_KEY or `wandb login` has one\n"
    )
    assert json.loads(said.out)["workspace"]["project"] == "ours"
    assert keys_of(said.out)["config"] == {"layout.value.label", "layout.value.tensor"}
    assert main(["workspace", sweep, "--json", "--project", "other"]) == 0
    said = capsys.readouterr()
    assert (said.err, json.loads(said.out)["report"]["project"]["name"]) == ("", "other")


def test_with_a_key_both_are_saved(sweep, capsys, monkeypatch):
    saved = []

    def save(self):
        saved.append(type(self).__name__)
        return SimpleNamespace(url=f"https://wandb.test/{self.entity}/{type(self).__name__}")

    for module, name in (("workspaces", "Workspace"), ("reports.v2", "Report")):
        monkeypatch.setattr(getattr(import_quietly(f"wandb_workspaces.{module}"), name), "save", save)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("titanlab.tracker.wandb_upload.lack", lambda: None)
    assert main(["workspace", sweep]) == 0
    assert capsys.readouterr().out == "https://wandb.test/us/Workspace\nhttps://wandb.test/us/Report\n"

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

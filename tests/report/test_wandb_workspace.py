"""The wandb workspace and report of a sweep: their panels, and what they take from the runs."""

import json

from titanlab.costs import meter
from titanlab.report.wandb_workspace import RESIDENT, json_text, view_of
from titanlab.system import import_quietly

ROWS = [
    {"accelerator": "cpu", "layout.tensor": 1, "layout.shard": 2, "layout.pipeline": 1},
    {"accelerator": "cpu", "layout.tensor": 2, "layout.shard": 1, "layout.pipeline": 1},
    {"accelerator": None, "layout.tensor": None},
]


def view(**given):
    return view_of("layouts", ROWS, **{"tracker": {}, "project": None, "entity": None, **given})


def panels(text):
    """Kind and config of each panel of the workspace, and of the report."""
    both = json.loads(text)
    sections = both["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    grids = [block["metadata"] for block in both["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    found = [panel for section in sections for panel in section["panels"]]
    shown = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    return [[(panel["viewType"], panel["config"]) for panel in each] for each in (found, shown)]


def keys_of(text):
    """All keys that the panels of the workspace read: of the config, of the summary, and of the rows."""
    named, rows = [], set()
    for kind, panel in panels(text)[0]:
        if kind == "Parallel Coordinates Plot":
            named += [column["accessor"] for column in panel["columns"]]
        elif kind == "Scatter Plot":
            named += [panel["xAxis"], panel["yAxis"]]
        elif kind == "Bar Chart":
            named += [f"config:{panel['groupBy']}", *(f"summary:{name}" for name in panel["metrics"])]
        else:
            rows |= {panel["xAxis"], *panel["metrics"]}
    by_kind = {
        kind: {name.partition(":")[2] for name in named if name.startswith(kind)} for kind in ("config", "summary")
    }
    return {**by_kind, "rows": rows}


def test_panels_of_both():
    text = json_text(view(project="p", entity="e"))
    workspace, report = panels(text)
    assert [kind for kind, _ in workspace] == [
        *("Bar Chart", "Bar Chart", "Scatter Plot", "Scatter Plot", "Run History Line Plot"),
        "Parallel Coordinates Plot",
    ]
    assert report == workspace
    assert keys_of(text) == {
        # wandb writes a step into a mapping as `.value.`; only axes that differ have a column.
        "config": {"layout.value.label", "layout.value.tensor", "layout.value.shard", "world.value"},
        "summary": {meter.TOKENS_PER_SECOND, meter.MFU, RESIDENT},
        "rows": {meter.TOKENS_SEEN, meter.LOSS, meter.VALIDATION_LOSS},
    }
    both = json.loads(text)
    assert (both["workspace"]["project"], both["workspace"]["entity"]) == ("p", "e")
    (runs,) = both["workspace"]["spec"]["section"]["runSets"]
    assert [(rule["key"]["name"], rule["value"]) for rule in runs["filters"]["filters"]] == [("group", "layouts")]


def test_what_is_saved_fits_the_schema_of_wandbs_package():
    """The package reads both back as panels that it knows, each with every value that was saved."""
    workspaces, reports = (import_quietly(f"wandb_workspaces.{name}") for name in ("workspaces", "reports.v2"))
    internal = import_quietly("wandb_workspaces.workspaces.internal")
    of_report = import_quietly("wandb_workspaces.reports.v2.internal")
    saved = json.loads(json_text(view(project="p", entity="e")))
    workspace = workspaces.Workspace._from_model(internal.View.model_validate(saved["workspace"]))
    report = reports.Report._from_model(of_report.ReportViewspec.model_validate(saved["report"]))
    known = ["BarPlot", "BarPlot", "ScatterPlot", "ScatterPlot", "LinePlot", "ParallelCoordinatesPlot"]
    of_workspace = [panel for section in workspace.sections for panel in section.panels]
    of_blocks = [panel for block in report.blocks if isinstance(block, reports.PanelGrid) for panel in block.panels]
    for found in (of_workspace, of_blocks):
        assert [type(panel).__name__ for panel in found] == known
        assert all(panel.title for panel in found)
    again = json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
    assert panels(json.dumps({**saved, "workspace": again}))[0] == panels(json.dumps(saved))[0]

"""The wandb workspace and report of a sweep: their panels, and what they take from the runs."""

import json

from titanlab.costs import meter
from titanlab.report.wandb_workspace import RESIDENT, json_text, view_of

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

"""A wandb workspace and a wandb report of a sweep, as code (package wandb-workspaces)."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlab.costs import AXES, meter
from titanlab.errors import ConfigError, TitanlabError
from titanlab.system import import_quietly

_PACKAGE = "wandb_workspaces"
# Keys of the config and of the rows that runs send to wandb; tests/report/test_wandb_workspace.py compares them.
LABEL, WORLD = "layout.label", "world"
RESIDENT = "memory/max_resident(GiB)"
_WIDTH, _HEIGHT = 24, 8  # of a panel in a report's grid, which is 24 wide


@dataclass(frozen=True, kw_only=True)
class View:
    """The runs and columns that the panels show.

    Attributes:
        sweep: name of the sweep, which is the runs' group.
        entity: user or team; empty: the account's default.
        axes: axes of the layout that differ between the runs.
    """

    sweep: str
    project: str
    entity: str
    axes: tuple[str, ...]
    memory: str


def check_installed() -> None:
    """Check that the package is installed; raise a ConfigError if it is not."""
    if importlib.util.find_spec(_PACKAGE) is None:
        rule = "needs the package wandb-workspaces, which is not installed"
        raise ConfigError("verb", "workspace", rule, "pip install 'titanlab[wandb-workspaces]'")


def view_of(
    sweep: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    tracker: Mapping[str, Any],
    project: str | None,
    entity: str | None,
) -> View:
    """The view for a sweep.

    Args:
        tracker: the config of wandb in a run of the sweep; empty if there is none.
        project, entity: as the user gave them; None: use those of the runs, or of the environment.
    """
    degrees = {axis: {row.get(f"layout.{axis}") for row in rows} - {None} for axis in AXES}
    differ = tuple(axis for axis in AXES if len(degrees[axis]) > 1)
    is_on_gpu = any(row.get("accelerator") == "cuda" for row in rows)
    return View(
        sweep=tracker.get("group") or sweep,
        project=project or tracker.get("project") or os.environ.get("WANDB_PROJECT") or "titanlab",
        entity=entity or tracker.get("entity") or os.environ.get("WANDB_ENTITY") or "",
        axes=differ or AXES,
        memory=meter.MEMORY_RESERVED if is_on_gpu else RESIDENT,
    )


def made(view: View) -> tuple[Any, Any]:
    """The workspace and the report, each with the same panels."""
    workspaces, reports = (import_quietly(f"{_PACKAGE}.{name}") for name in ("workspaces", "reports.v2"))
    runs, title = f"Metric('Group') == {view.sweep!r}", f"titanlab {view.sweep}"
    # No project here: the report's own project applies, and naming one would make a network request.
    runset = reports.Runset(name=view.sweep, filters=runs)
    sections, blocks = list[Any](), list[Any]()
    for head, panel in _panels(view, reports).items():
        sections.append(workspaces.Section(name=head, panels=[panel], is_open=True))
    for head, panel in _panels(view, reports).items():
        panel.layout = reports.Layout(x=0, y=0, w=_WIDTH, h=_HEIGHT)
        blocks += [reports.H2(head), reports.PanelGrid(runsets=[runset], panels=[panel])]
    settings = workspaces.RunsetSettings(filters=runs)
    own = {"entity": view.entity, "project": view.project}
    workspace = workspaces.Workspace(**own, name=title, sections=sections, runset_settings=settings)
    about = "Runs of a sweep: medians after warm-up, by the names of metrics.jsonl."
    return workspace, reports.Report(**own, title=title, description=about, blocks=blocks, width="fluid")


def json_text(view: View) -> str:
    """The workspace and the report as wandb's server takes them, as JSON."""
    models = [json.loads(each._to_model().model_dump_json(by_alias=True, exclude_none=True)) for each in made(view)]
    return json.dumps(dict(zip(("workspace", "report"), models, strict=True)), indent=2)


def save(view: View) -> list[str]:
    """Save the workspace and the report in wandb, with the key of the environment. Returns their addresses.

    Raises:
        TitanlabError: wandb refuses.
    """
    try:
        if not view.entity:
            view = replace(view, entity=import_quietly("wandb").Api().default_entity)
        return [str(each.save().url) for each in made(view)]
    # wandb raises its own errors, and errors of requests and of its GraphQL client.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TitanlabError(f"wandb has not saved the workspace ({type(error).__name__}: {lines[0]})") from error


def _panels(view: View, module: Any) -> dict[str, Any]:
    """The panels by heading, in the order of the page."""
    summary, config, name = module.SummaryMetric, module.Config, {"legend_template": "${run:displayName}"}

    def by_layout(title: str, metric: str) -> Any:
        group = {"groupby": config(LABEL), "groupby_aggfunc": "median", "groupby_rangefunc": "minmax"}
        return module.BarPlot(title=f"{title}, by layout", metrics=[metric], orientation="h", **group)

    def column(metric: Any, shown: str) -> Any:
        return module.ParallelCoordinatesPlotColumn(metric=metric, display_name=shown)

    level = "tokens per second of one device against processes: a level line is perfect scaling"
    speed, losses = summary(meter.TOKENS_PER_SECOND), [meter.LOSS, meter.VALIDATION_LOSS]
    figures = {"GiB": summary(view.memory), "MFU %": summary(meter.MFU), "tokens/s": speed}
    columns = [column(config(f"layout.{axis}"), axis) for axis in view.axes]
    columns += [column(metric, shown) for shown, metric in figures.items()]
    return {
        "Tokens per second by layout": by_layout("tokens per second of one device", meter.TOKENS_PER_SECOND),
        "MFU by layout": by_layout("MFU in percent", meter.MFU),
        "Memory against MFU": module.ScatterPlot(
            title="peak memory against MFU", x=summary(view.memory), y=summary(meter.MFU), **name
        ),
        "Scaling": module.ScatterPlot(title=level, x=config(WORLD), y=speed, log_x=True, **name),
        "Loss by tokens": module.LinePlot(
            title="loss by tokens", x=meter.TOKENS_SEEN, y=losses, title_x="tokens trained on"
        ),
        "Layout axes": module.ParallelCoordinatesPlot(title="layout axes, speed and memory", columns=columns),
    }

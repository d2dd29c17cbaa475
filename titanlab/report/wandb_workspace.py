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
# Keys of the config and of the rows that runs send: tests/report/test_wandb_workspace.py compares them.
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
    """Check that the package is installed.

    Raises:
        ConfigError: it is not installed.
    """
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
    runs = f"Metric('Group') == {view.sweep!r}"
    workspace = workspaces.Workspace(
        entity=view.entity,
        project=view.project,
        name=f"titanlab {view.sweep}",
        sections=[
            workspaces.Section(name=heading, panels=[panel], is_open=True)
            for heading, panel in _panels(view, reports).items()
        ],
        runset_settings=workspaces.RunsetSettings(filters=runs),
    )
    # No project here: the report's own project applies, and naming one would make a network request.
    runset = reports.Runset(name=view.sweep, filters=runs)
    blocks: list[Any] = []
    for head, panel in _panels(view, reports).items():
        panel.layout = reports.Layout(x=0, y=0, w=_WIDTH, h=_HEIGHT)
        blocks += [reports.H2(head), reports.PanelGrid(runsets=[runset], panels=[panel])]
    report = reports.Report(
        entity=view.entity,
        project=view.project,
        title=f"titanlab {view.sweep}",
        description="Runs of a sweep: medians after warm-up, by the names of metrics.jsonl.",
        blocks=blocks,
        width="fluid",
    )
    return workspace, report


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
    """The panels in their order, by their headings."""

    def by_layout(title: str, metric: str) -> Any:
        return module.BarPlot(
            title=f"{title}, by layout",
            metrics=[metric],
            orientation="h",
            groupby=module.Config(LABEL),
            groupby_aggfunc="median",
            groupby_rangefunc="minmax",
        )

    memory = module.ScatterPlot(
        title="peak memory against MFU",
        x=module.SummaryMetric(view.memory),
        y=module.SummaryMetric(meter.MFU),
        legend_template="${run:displayName}",
    )
    scaling = module.ScatterPlot(
        title="tokens per second of one device against processes: a level line is perfect scaling",
        x=module.Config(WORLD),
        y=module.SummaryMetric(meter.TOKENS_PER_SECOND),
        log_x=True,
        legend_template="${run:displayName}",
    )
    loss = module.LinePlot(
        title="loss by tokens", x=meter.TOKENS_SEEN, y=[meter.LOSS, meter.VALIDATION_LOSS], title_x="tokens trained on"
    )
    column = module.ParallelCoordinatesPlotColumn
    coordinates = module.ParallelCoordinatesPlot(
        title="layout axes, speed and memory",
        columns=[
            *(column(metric=module.Config(f"layout.{axis}"), display_name=axis) for axis in view.axes),
            column(metric=module.SummaryMetric(view.memory), display_name="GiB"),
            column(metric=module.SummaryMetric(meter.MFU), display_name="MFU %"),
            column(metric=module.SummaryMetric(meter.TOKENS_PER_SECOND), display_name="tokens/s"),
        ],
    )
    return {
        "Tokens per second by layout": by_layout("tokens per second of one device", meter.TOKENS_PER_SECOND),
        "MFU by layout": by_layout("MFU in percent", meter.MFU),
        "Memory against MFU": memory,
        "Scaling": scaling,
        "Loss by tokens": loss,
        "Layout axes": coordinates,
    }

"""The figure of the load of experts, from the rows that runs of models with experts have in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titanlab.records.metrics_file import EXPERTS
from titanlab.report.figures.experts import COLUMNS, MOST_MAPS, ExpertLoad, expert_load
from titanlab.report.page.facts import Facts
from titanlab.report.page.panels import Panel
from titanlab.report.page.tables import Cell, Table, number, run_cell
from titanlab.system.text import counted

# A row of a stranger's run may have any number of either.
_MOST_BLOCKS, _MOST_EXPERTS, _MOST_TOKENS = 1024, 4096, 2**53
_MOST_NAMED = 4
_CAPTION = (
    "A map has a row for each block and a column for each expert: its tokens over all processes, relative to an equal "
    "share of the block's. Paler is nearer to an equal share, orange is more, purple is less, black is no token. "
    "Recipes with the same counts have one map. No token is dropped: a loaded expert computes all that it gets."
)


def expert_panel(facts: Facts) -> Panel | None:
    """The newest load of each recipe's experts; None: no run has recorded one."""
    loads = _loads(facts)
    if not loads:
        return None
    drawn = loads[:MOST_MAPS]
    notes = []
    if len(loads) > len(drawn):
        notes.append(f"The figure has the first {len(drawn)} of {len(loads)} different loads; all are in the table.")
    clauses = "; ".join(map(str, drawn[:_MOST_NAMED]))
    return Panel(
        name="experts",
        title="Load of the experts",
        figure=expert_load(drawn),
        caption=_CAPTION,
        description=f"{counted(len(drawn), 'map')} of tokens by block and expert. {clauses}.",
        columns=COLUMNS,
        values=_table(loads),
        notes=notes,
    )


def _loads(facts: Facts) -> list[ExpertLoad]:
    """The newest load of each recipe; recipes with the same are one."""
    loads: dict[str, tuple[ExpertLoad, list[str]]] = {}
    for group, row in facts.shown:
        rows = [load for metrics in facts.metrics(row, EXPERTS) if (load := _load(metrics)) is not None]
        if not rows:
            continue
        newest = replace(rows[-1], runs=[str(row["run"])], label=group.label)
        key = repr((newest.step, newest.steps, newest.counts))
        load, labels = loads.get(key, (newest, []))
        loads[key] = replace(load, runs=[*dict.fromkeys([*load.runs, str(row["run"])])]), [*labels, group.label]
    return [replace(load, label=_label(labels)) for load, labels in loads.values()]


def _load(metrics: Mapping[str, Any]) -> ExpertLoad | None:
    """The load in a row of metrics.jsonl; None: it has none that a run writes."""
    counts, steps = metrics.get("counts"), metrics.get("steps")
    if not (isinstance(counts, list) and 0 < len(counts) <= _MOST_BLOCKS and _is_count(steps)):
        return None
    if not all(isinstance(block, list) and 0 < len(block) <= _MOST_EXPERTS for block in counts):
        return None
    if len({len(block) for block in counts}) > 1 or not all(_is_count(count) for block in counts for count in block):
        return None
    return ExpertLoad(runs=[], label="", step=metrics["step"], steps=int(steps or 0), counts=counts)


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _label(labels: list[str]) -> str:
    more = len(labels) - 1
    return labels[0] + (f" and {counted(more, 'recipe')} with the same counts" if more else "")


def _table(loads: list[ExpertLoad]) -> Table:
    """A row for each block of each load."""
    rows = []
    for load in loads:
        for block, (counts, shares) in enumerate(zip(load.counts, load.shares, strict=True)):
            most, least = (shares.index(end) for end in (max(shares), min(shares)))
            rows.append(
                [
                    run_cell(load.runs[0]),
                    *(number(value) for value in (load.step, load.steps, block)),
                    *(cell for expert in (most, least) for cell in (number(expert), _share(shares[expert]))),
                    number(sum(not count for count in counts)),
                ]
            )
    headings = [
        *("run", "after step", "steps", "block", "most loaded", "its share", "least loaded", "its share"),
        "experts without a token",
    ]
    return Table(caption="Loads by block: shares relative to an equal one", headings=headings, rows=rows)


def _share(value: float) -> Cell:
    return Cell(text=f"{value:.3f}", is_number=True)

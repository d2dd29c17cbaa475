"""The sections of a report that have a figure: with a caption, a description in words, and a table of the values."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlab.costs import meter
from titanlab.errors import TitanlabError
from titanlab.plan import machine_of, most_memory, reserved_bytes, timeline_of
from titanlab.plan.step_time import step_time
from titanlab.recipe import Recipe, from_mapping
from titanlab.records import EXPERTS
from titanlab.report.facts import Facts
from titanlab.report.figures import bars, over_time, scatter, style
from titanlab.sweep import state_tone
from titanlab.system import counted, grouped, significant
from titanlab.techniques.profiler.profilers_schema import BY_ITEM, ITEMS, REST, item_metric
from titanlab.techniques.schedule.action import simulate

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure


_OVERSUBSCRIBED = (
    " Hollow or hatched marks are runs with more processes than cores, which took turns: their speed says nothing."
)
# Errors that may be raised when the report computes with the numbers of somebody else's recipe.
_UNUSABLE = (TitanlabError, ArithmeticError, ValueError, LookupError)
_MOST_NAMED = 4
_LONG = 40
_MOST_RECIPES = 40


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table.

    Attributes:
        run: name of a run's folder, to which the cell links.
        more: text that is shown on demand.
        items: parts of the text that should not be broken over lines.
    """

    text: str
    run: str = ""
    more: str = ""
    is_number: bool = False
    items: Sequence[str] = ()

    @property
    def is_long(self) -> bool:
        """Whether the cell needs a wide column."""
        return len(self.text) > _LONG or bool(self.items)


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """One table; a row's first cell is the row's heading. `columns`: headings are column names, shown as code."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    columns: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page.

    Attributes:
        id: also the name of the figure's file.
        caption: how to read the figure.
        description: what the figure shows, for people who do not see it.
        columns: names of the table's columns, or of metrics, from which the figure is drawn.
        values: the numbers that the figure shows, by run folder.
        notes: what is missing in the figure, and why.
        details: (summary, text) of each text that is shown on demand.
    """

    id: str
    title: str
    texts: Sequence[str] = ()
    command: str = ""
    figure: TracedFigure | None = None
    caption: str = ""
    description: str = ""
    columns: Sequence[str] = ()
    values: PageTable | None = None
    notes: Sequence[str] = ()
    tables: Sequence[PageTable] = ()
    details: Sequence[tuple[str, str]] = ()


def cell(value: Any, *, digits: int = 4) -> Cell:
    """A cell with a text or a plain value; numbers are rounded to significant digits, None gives an empty cell."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, bool):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | float):
        whole = isinstance(value, int) or abs(value) >= 1000
        return Cell(text=grouped(value) if whole else significant(value, digits), is_number=True)
    return Cell(text="" if value is None else str(value))


def run_cell(name: object) -> Cell:
    """A cell that links to a run's folder."""
    return Cell(text=str(name), run=str(name))


def table(caption: str, headings: Sequence[str], rows: Iterable[Iterable[Any]], *, columns: bool = False) -> PageTable:
    """A table of cells or plain values."""
    return PageTable(caption=caption, headings=headings, rows=[list(map(cell, row)) for row in rows], columns=columns)


def by_run(caption: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> PageTable:
    """A table with some columns of the sweep's table, a row for each run."""
    values = ([run_cell(row["run"]), *(row.get(name) for name in columns)] for row in rows)
    return table(caption, ["run", *columns], values, columns=True)


def speed_text(value: float) -> str:
    """Tokens per second, or MFU in percent, as text."""
    return grouped(value) if value >= 100 else significant(value)


def figure_sections(facts: Facts) -> list[Section]:
    """The sections with a figure, or the reason why there is none; a section about experts only if models have them."""
    has_mfu = any(row["mfu_percent"] is not None for row in facts.done)
    return [
        _pareto(facts, speed="mfu_percent" if facts.by == "mfu" and has_mfu else "tokens_per_second"),
        _throughput(facts),
        _step_time(facts),
        _memory(facts),
        _loss(facts),
        *_experts(facts),
        _timelines(facts),
        _estimates(facts),
    ]


def _pareto(facts: Facts, *, speed: str) -> Section:
    points = scatter.points_of(facts.rows, speed)
    failed = [row for row in facts.runs if row["state"] == "ended" and state_tone(row) in ("bad", "halted")]
    caption = (
        "Each point is a recipe: of its runs that are done, the geometric mean of the speed and the median of the "
        "memory. Less memory is left, more speed is up. "
        "A diamond is a recipe that no other one beats in both."
    )
    columns = [scatter.MEMORY, speed, "outcome"]
    if failed:
        caption += (
            " A red cross is a run that failed; in the strip below where its speed was never measured, at the memory "
            "that was measured or estimated."
        )
        columns += [scatter.ESTIMATED_MEMORY] if scatter.ESTIMATED_MEMORY in failed[0] else []
    description = f"Scatter of {counted(len(points), 'recipe')}."
    if points:
        memory, rate = [point.memory for point in points], [point.speed for point in points]
        description += f" Memory from {min(memory):.2f} to {max(memory):.2f} GiB, {scatter.SPEEDS[speed]} from "
        description += f"{speed_text(min(rate))} to {speed_text(max(rate))}."
    if front := scatter.front_of(points):
        named = [f"{p.group.label} ({speed_text(p.speed)} at {p.memory:.2f} GiB)" for p in front]
        description += f" Not beaten in both: {listed(named)}."
    if failed:
        description += f" {counted(len(failed), 'run')} failed."
    return Section(
        id="pareto",
        title=f"Memory against {'MFU' if speed == 'mfu_percent' else 'speed'}",
        figure=scatter.pareto(facts.rows, speed=speed),
        caption=caption + _oversubscribed(facts),
        description=description,
        columns=columns,
        values=by_run("Memory and speed of every run", facts.runs, columns),
    )


def _throughput(facts: Facts) -> Section:
    kept = {id(row) for group in facts.groups[:_MOST_RECIPES] for row in group.rows}
    rows = facts.rows if len(facts.groups) <= _MOST_RECIPES else [row for row in facts.rows if id(row) in kept]
    measured = [(group, group.typical("tokens_per_second")) for group in facts.groups]
    shown = [f"{group.label} {grouped(value)}" for group, value in measured if value is not None]
    caption = "A bar is the geometric mean over the runs of a recipe, a white point is one run; each run counts once."
    if facts.bands:
        caption += f" {facts.band_text}"
    else:
        caption += " No recipe was run more than once, so that nothing is known of the noise between runs."
    notes = []
    if len(facts.groups) > _MOST_RECIPES:
        notes.append(f"The figure has the {_MOST_RECIPES} fastest of {counted(len(facts.groups), 'recipe')}.")
    columns = ["tokens_per_second", "mfu_percent", "measured_steps", "oversubscribed", "outcome"]
    return Section(
        id="throughput",
        title="Throughput by layout",
        figure=bars.throughput_by_layout(rows, ranked=True, bands=facts.bands),
        caption=caption + _oversubscribed(facts),
        description=f"Bars of tokens per second of one device. {listed(shown) or 'No run was measured'}.",
        columns=columns,
        values=by_run("Speed of every run", facts.runs, columns),
        notes=notes,
    )


def _step_time(facts: Facts) -> Section:
    splits = measured_splits(facts)
    title, estimated = "Where the time of a step goes", ""
    caption = "Measured with profiler=breakdown: the mean over ranks of the latest window of steps. "
    hidden = "while nothing computes"
    if not splits and facts.done:
        why = "Not measured: no run has profiler=breakdown, or none has taken the steps of its window."
        return Section(id="step-time", title=title, texts=[why])
    if not splits:
        splits = _declared(facts, lambda recipe: step_time(recipe, machine_of(recipe)).parts)
        estimated = " (estimate)"
        caption = "An estimate of the planner, and no measurement: no run is done. "
        hidden = "that no computation hides"
    if not splits:
        return Section(id="step-time", title=title, texts=["Neither measured nor estimated for any recipe."])
    parts = list(dict.fromkeys(name for split in splits for name, seconds in split.parts.items() if seconds))
    heading = "Seconds of a step by part" + (", estimated" if estimated else "")
    return Section(
        id="step-time",
        title=title + estimated,
        figure=bars.step_time_split(splits),
        caption=f"{caption}“Exposed” is communication of an axis {hidden}.",
        description=f"Stacked bars of the seconds of a step. {_largest_parts(splits, bars.part_name)}.",
        columns=sorted({column for split in splits for column in split.columns}),
        values=_values_of(splits, heading, {name: bars.part_name(name) for name in parts}),
        notes=_without_bar(facts, splits),
    )


def _largest_parts(splits: Sequence[bars.StackedBar], name_of: Callable[[str], str]) -> str:
    """The two largest parts of each bar in words."""
    clauses = []
    for split in splits:
        whole = sum(split.parts.values()) or 1.0
        largest = sorted(split.parts.items(), key=lambda item: -item[1])[:2]
        shares = (f"{name_of(name)} {100 * value / whole:.0f} %" for name, value in largest)
        clauses.append(f"{split.label}: {', '.join(shares)}")
    return listed(clauses)


def _values_of(splits: Sequence[bars.StackedBar], heading: str, parts: Mapping[str, str]) -> PageTable:
    """A table with the parts of each bar in a row; `parts` has the heading of each part."""
    rows = ([run_cell(each.run), *(cell(each.parts.get(part), digits=3) for part in parts)] for each in splits)
    return table(heading, ["run", *parts.values()], rows)


def _without_bar(facts: Facts, splits: Sequence[bars.StackedBar]) -> list[str]:
    drawn = {split.run for split in splits}
    missing = [group.label for group, _ in facts.shown if drawn.isdisjoint(str(row["run"]) for row in group.rows)]
    notes = [f"No bar, because figures are missing: {listed(missing)}."] if missing else []
    if len(facts.groups) > len(facts.shown):
        notes.append(f"Only the {len(facts.shown)} fastest of {counted(len(facts.groups), 'recipe')} are looked at.")
    return notes


def _measured(
    facts: Facts, kind: str, columns_of: Callable[[Mapping[str, Any]], Mapping[str, str]]
) -> list[bars.StackedBar]:
    """A bar for each recipe with logged rows of this kind, from the newest row. `columns_of`: row → {part: column}."""
    splits = []
    for group, _ in facts.shown:
        begun = sorted((row for row in group.rows if row["step"]), key=lambda row: row["outcome"] != "done")
        found = ((row, own[-1]) for row in begun if (own := facts.metrics(row, kind)))
        for row, newest in itertools.islice(found, 1):
            if columns := columns_of(newest):
                parts = {part: float(newest[column]) for part, column in columns.items()}
                columns_drawn = list(columns.values())
                splits.append(bars.StackedBar(str(row["run"]), group.label, parts, columns_drawn, is_measured=True))
    return splits


def _declared(facts: Facts, parts_of: Callable[[Recipe], Mapping[str, float]]) -> list[bars.StackedBar]:
    """A bar of the planner's numbers for each recipe whose machine the planner knows."""
    splits = []
    for group, row in facts.shown:
        if (recipe := _recipe(facts, row)) is not None:
            with contextlib.suppress(*_UNUSABLE):
                parts = parts_of(recipe)
                splits.append(bars.StackedBar(str(row["run"]), group.label, parts, ["config.yaml"], is_measured=False))
    return splits


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0


def measured_splits(facts: Facts) -> list[bars.StackedBar]:
    """Bars of the seconds of a step by part: the latest window of runs with `profiler=breakdown`."""
    begin, end = "breakdown/", "(s)"

    def columns(row: Mapping[str, Any]) -> dict[str, str]:
        names = [name for name, value in row.items() if name.startswith(begin) and _is_size(value) and value]
        parts = {name.removeprefix(begin).removesuffix(end): name for name in names}
        return {part.removeprefix("exposed_"): name for part, name in parts.items() if part != "step"}

    return _measured(facts, "breakdown", columns)


def measured_memory(facts: Facts) -> list[bars.StackedBar]:
    """Bars of GiB by item, on the rank that needs most, of runs with `profiler=breakdown`."""
    columns = {item: item_metric(item) for item in (*ITEMS, REST)}
    return _measured(
        facts, BY_ITEM, lambda row: columns if all(_is_size(row.get(name)) for name in columns.values()) else {}
    )


def declared_memory(facts: Facts) -> list[bars.StackedBar]:
    """Bars of the planner's GiB by item; `rest` is the memory that is reserved but has no tensors."""

    def parts(recipe: Recipe) -> dict[str, float]:
        most, machine = most_memory(recipe), machine_of(recipe)
        items = {bars.ITEM_NAMES.get(item, item): size for item, size in most.items.items()}
        items[REST] = max(0, int(reserved_bytes(recipe, machine, most)) - most.allocated)
        return {item: size / 2**30 for item, size in items.items() if size}

    return _declared(facts, parts)


def memory_text(facts: Facts) -> str:
    """The memory items of the best recipe, for the box at the top of the page; empty: unknown."""
    for splits_of, word in ((measured_memory, ""), (declared_memory, ", declared")):
        for split in splits_of(facts):
            if facts.best is not None and split.run in (row["run"] for row in facts.best.rows):
                items = ", ".join(f"{item} {significant(size, 3)}" for item, size in split.parts.items())
                return f"{significant(sum(split.parts.values()), 3)} GiB{word}: {items}"
    return ""


def _memory(facts: Facts) -> Section:
    measured, declared = measured_memory(facts), declared_memory(facts)
    splits = measured or declared
    title = "Memory by item" + ("" if measured else " (declared)")
    if not splits:
        return Section(id="memory", title=title, texts=["Neither measured nor declared for any recipe."])
    items = [item for item in bars.MEMORY_ITEMS if any(item in split.parts for split in (*measured, *declared))]
    caption = (
        "Measured before the first window of profiler=breakdown, on the rank that needs most: parameters, gradients "
        "and optimizer state before an update; the rest is what the peak has beyond these: activations, gathered "
        "parameters, buffers, and on a CPU the process. "
        if measured
        else "No run has measured it. "
    )
    rows = [
        [split.label, "measured" if split.is_measured else "declared", *(split.parts.get(item) for item in items)]
        for group, _ in facts.shown
        for split in (*measured, *declared)
        if split.label == group.label and split.run in (row["run"] for row in group.rows)
    ]
    return Section(
        id="memory",
        title=title,
        figure=bars.memory_items(splits),
        caption=caption + "Declared is the planner's account at the moment of a step when the sum is largest; its rest "
        "is what is beside tensors.",
        description=f"Stacked bars of the items of memory. {_largest_parts(splits, str)}.",
        columns=sorted({column for split in splits for column in split.columns}),
        values=_values_of(splits, "GiB by item", {item: item for item in items}),
        notes=_without_bar(facts, splits),
        tables=[
            table("Items of memory in GiB: measured, and declared by the planner", ["recipe", "figures", *items], rows)
        ],
    )


def _loss(facts: Facts) -> Section:
    # One run of each recipe; diverged runs first.
    begun = [row for _, row in facts.shown if row["step"]]
    diverged = [row for row in facts.runs if row["outcome"] == "nan" and row not in begun]
    chosen = [*diverged[: style.MOST_LINES // 2], *begun][: style.MOST_LINES]
    label_of = {row["run"]: group.label for group in facts.groups for row in group.rows}
    often = Counter(label_of[row["run"]] for row in chosen)
    labels, steps = {}, []
    for row in chosen:
        label = label_of[row["run"]]
        labels[row["run"]] = f"{label} · repeat {row['repeat']}" if often[label] > 1 else label
        about = {"run": row["run"], "name": row["name"], "layout.label": row["layout.label"]}
        steps += [{**about, **metrics} for metrics in facts.metrics(row, "train")]
    drawn = len({step["run"] for step in steps})
    last = [f"{row['run']} {significant(row['loss'], 5)}" for row in chosen if row["loss"] is not None]
    left = len(facts.runs) - drawn
    notes = [
        f"One run of each recipe is drawn, {style.MOST_LINES} at most; {counted(left, 'run')} more are in the table."
    ]
    columns = ["first_loss", "loss", "validation_loss", "tokens_seen", "step"]
    return Section(
        id="loss",
        title="Loss against tokens",
        figure=over_time.loss_by_tokens(steps, labels=labels, colours=style.recipe_colours(facts.rows)),
        caption="Recipes that train the same have one curve; a wider line then shows on both sides of a narrower one.",
        description=f"Lines of the training loss of {counted(drawn, 'run')}. Last loss: {listed(last) or 'none'}.",
        columns=[meter.LOSS, meter.TOKENS_SEEN],
        values=by_run("First and last loss of every run", facts.runs, columns),
        notes=notes if left > 0 and drawn else [],
    )


# Limits, because a row of somebody else's run may have any numbers.
_MOST_COUNTS, _MOST_TOKENS = 2**22, 2**53
_MOST_BLOCKS_NAMED = 4
_CAPTION = (
    "A map has a row for each block and a column for each expert: its tokens over all processes, relative to an equal "
    "share of the block's. Paler is nearer to an equal share, orange is more, purple is less, black means no token. "
    "Recipes with the same counts have one map. No token is dropped: a loaded expert computes all that it gets."
)


def _experts(facts: Facts) -> list[Section]:
    """The section about the newest load of each recipe's experts; empty: no run has recorded a load."""
    # Recipes with the same load share one map.
    same: dict[str, tuple[over_time.ExpertLoad, list[str]]] = {}
    for group, row in facts.shown:
        run = str(row["run"])
        rows = [load for metrics in facts.metrics(row, EXPERTS) if (load := _load(metrics)) is not None]
        if rows:
            newest = replace(rows[-1], runs=[run])
            load, labels = same.get(key := repr((newest.step, newest.steps, newest.counts)), (newest, []))
            same[key] = replace(load, runs=[*dict.fromkeys([*load.runs, run])]), [*labels, group.label]
    loads = []
    for load, (first, *others) in same.values():
        more = f" and {counted(len(others), 'recipe')} with the same counts" if others else ""
        loads.append(replace(load, label=first + more))
    if not loads:
        return []
    drawn = loads[: over_time.MOST_MAPS]
    notes = []
    if len(loads) > len(drawn):
        notes.append(f"The figure has the first {len(drawn)} of {len(loads)} different loads; all are in the table.")
    values = []
    for load in loads:
        for block, shares in enumerate(load.shares):
            cells: list[Any] = [run_cell(load.runs[0]), load.step, load.steps, block]
            for expert in (int(shares.argmax()), int(shares.argmin())):
                cells += [expert, Cell(text=f"{shares[expert]:.3f}", is_number=True)]
            values.append([*cells, int((shares == 0).sum())])
    headings = [
        *("run", "after step", "steps", "block", "most loaded", "its share", "least loaded", "its share"),
        "experts without a token",
    ]
    clauses = "; ".join(map(str, drawn[:_MOST_BLOCKS_NAMED]))
    return [
        Section(
            id="experts",
            title="Load of the experts",
            figure=over_time.expert_load(drawn),
            caption=_CAPTION,
            description=f"{counted(len(drawn), 'map')} of tokens by block and expert. {clauses}.",
            columns=over_time.EXPERT_COLUMNS,
            values=table("Loads by block: shares relative to an equal one", headings, values),
            notes=notes,
        )
    ]


def _load(metrics: Mapping[str, Any]) -> over_time.ExpertLoad | None:
    """The load in a row of metrics.jsonl; None: the row has no valid load."""
    steps = metrics.get("steps")
    try:
        counts = np.asarray(metrics.get("counts"), dtype=float)
    except (TypeError, ValueError):
        return None
    is_map = counts.ndim == 2 and 0 < counts.size <= _MOST_COUNTS
    if not (is_map and isinstance(steps, int) and ((counts >= 0) & (counts <= _MOST_TOKENS)).all()):
        return None
    return over_time.ExpertLoad(runs=[], label="", step=metrics["step"], steps=steps, counts=counts.tolist())


def _timelines(facts: Facts) -> Section:
    section = Section(id="timeline", title="Pipeline timelines")
    drawn, left_out = pipelines(facts)
    if not drawn:
        return replace(section, texts=["No recipe has a pipeline that can be drawn."])
    caption = "Simulated from the schedule: a row is a rank of the pipeline, a box one action; grey is idle. "
    estimated = any(pipeline.unit for pipeline in drawn)
    caption += "Durations are the planner's estimates." if estimated else "A backward pass takes two forward passes."
    by_name = {row["run"]: row for row in facts.runs}
    clauses, values = [], []
    for pipeline in drawn:
        idle = f"{100 * pipeline.timeline.bubble_share:.1f} %"
        clauses.append(f"{pipeline.label}: idle {idle} of all ranks' time")
        peaks = ", ".join(f"{peak:.3g}" for peak in pipeline.timeline.peak_in_flight)
        known = (by_name[pipeline.run][name] for name in over_time.TIMELINE_COLUMNS)
        values.append([run_cell(pipeline.run), *known, idle, peaks])
    headings = ["run", *over_time.TIMELINE_COLUMNS, "idle, of all ranks' time", "most microbatches in flight, by rank"]
    return replace(
        section,
        figure=over_time.pipeline_timelines(drawn),
        caption=caption,
        description=f"Timelines of {counted(len(drawn), 'pipeline')}. {listed(clauses)}.",
        columns=over_time.TIMELINE_COLUMNS,
        values=table("Pipelines", headings, values),
        notes=[f"Not drawn: {line}." for line in left_out[:_MOST_RECIPES]],
    )


# Largest number of cells in all timelines of a report; more would take megabytes.
MOST_CELLS = 3000


def pipelines(facts: Facts) -> tuple[list[over_time.PipelineTimeline], list[str]]:
    """One timeline for each different pipeline of the recipes; and why other recipes have no timeline."""
    timelines: list[over_time.PipelineTimeline] = []
    left_out: list[str] = []
    seen = set[tuple[Any, ...]]()
    cells = 0
    for group, row in facts.shown:
        # Recipes with the same pipeline have timelines of the same form: show one of them.
        names = ("schedule", "layout.pipeline", "layout.label", "microbatch", "global_batch", "model")
        key = tuple(row[name] for name in names)
        if (row["layout.pipeline"] or 1) == 1 or key in seen:
            continue
        seen.add(key)
        recipe = _recipe(facts, row)
        if recipe is None:
            left_out.append(f"{group.label}: its config.yaml cannot be read")
            continue
        schedule, ranks = recipe.schedule, recipe.layout.pipeline
        try:
            count = recipe.microbatches
            orders = schedule.actions(ranks=ranks, microbatches=count)
            actions = sum(map(len, orders))
            if cells + actions > MOST_CELLS:
                left_out.append(f"{group.label}: {actions:,} actions are too many for a page")
                continue
            timeline = None
            with contextlib.suppress(TitanlabError):
                timeline, unit = timeline_of(recipe, machine_of(recipe)), "s, estimated"
            if timeline is None:
                # Without the planner's times a backward pass takes two forward passes.
                timeline, unit = simulate(orders, schedule.placement(ranks=ranks)), ""
        except _UNUSABLE as error:
            left_out.append(f"{group.label}: {error}")
            continue
        label = f"{group.label} · {schedule.kind}, {counted(count, 'microbatch', 'microbatches')}"
        timelines.append(over_time.PipelineTimeline(run=str(row["run"]), label=label, timeline=timeline, unit=unit))
        cells += actions
    return timelines, left_out


def _recipe(facts: Facts, row: Mapping[str, Any]) -> Recipe | None:
    try:
        config = facts.config(row)
        return None if config is None else from_mapping(config)
    except (*_UNUSABLE, AssertionError, TypeError):
        return None


def _estimates(facts: Facts) -> Section:
    section = Section(id="estimate", title="Estimate against measurement")
    clauses = []
    for measured, estimated, what, _ in scatter.PAIRS:
        compared = scatter.compared(facts.rows, measured, estimated)
        errors = [abs(estimate / value - 1) for _, value, estimate in compared]
        if errors:
            within = f"{sum(error <= 0.2 for error in errors)} of {counted(len(errors), 'run')} within 20 %"
            clauses.append(f"{what}: {within}, worst {100 * max(errors):.0f} %")
    if not clauses:
        notes = Counter(str(row["estimate.note"]) for row in facts.runs if row.get("estimate.note"))
        why = "".join(f" Without an estimate: {note}." for note, _ in notes.most_common(1))
        return replace(section, texts=[f"No run that is done has both an estimate and a measurement.{why}"])
    columns = [column for measured, estimated, _, _ in scatter.PAIRS for column in (measured, estimated)]
    rows = [row for row in facts.done if any(row.get(estimated) is not None for _, estimated, _, _ in scatter.PAIRS)]
    return replace(
        section,
        figure=scatter.estimate_against_measurement(facts.rows),
        caption="A point is a run. On the line the planner's estimate is right; the dashed lines are 20 % away."
        + _oversubscribed(facts),
        description=f"Scatter of estimates and measurements. {'; '.join(clauses)}.",
        columns=columns,
        values=by_run("Estimates and measurements of every run", rows, columns),
    )


def _oversubscribed(facts: Facts) -> str:
    return _OVERSUBSCRIBED if any(row["oversubscribed"] for row in facts.done) else ""


def listed(texts: Sequence[str]) -> str:
    """The first texts in one line, and how many more there are."""
    more = len(texts) - _MOST_NAMED
    return "; ".join(texts[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")

"""The sections of sweeps that tell a story: steps of a stack, scaling over devices, growing sequences."""

from __future__ import annotations

from typing import Any

from titanlab.report.analyses import scaling_families
from titanlab.report.facts import Facts
from titanlab.report.figures import bars, growth
from titanlab.report.panels import Section, by_run, listed, table
from titanlab.sweep import POINT, RecipeRuns
from titanlab.system import grouped, significant

# Columns that follow the length of sequences; the batch and the layout change with it.
_FOLLOWING = ("seq_len", "global_batch", "microbatch", "schedule", f"{POINT}world", f"{POINT}parallelism")
_KEYS_FOLLOWING = (f"{POINT}training.", f"{POINT}parallelism.")
_METHOD = f"{POINT}parallelism.context_method"
_HOLLOW = " Hollow marks are recipes whose speed says nothing: more processes than cores, or emulated products."


def story_sections(facts: Facts) -> list[Section]:
    """The stories that the sweep's points tell; empty: none."""
    return [*_stack(facts), *_scaling(facts), *_context(facts)]


def _stack(facts: Facts) -> list[Section]:
    steps = facts.speeds.steps
    if not steps:
        return []
    # Beside a bar there is room for the numbers only.
    gains = {step.entry.label: step.gain_text.partition(", ")[0].replace("95% interval ", "") for step in steps}
    shown = [steps[0].before.group, *(step.entry.group for step in steps)]
    rows = [[shown[0].label, _whole(shown[0].typical("tokens_per_second")), "", ""]]
    rows += [[step.entry.label, _whole(step.entry.centre), step.before.label, step.gain_text] for step in steps]
    clauses = [f"{step.entry.label} {step.gain_text}" for step in steps]
    columns = ["tokens_per_second", "stack_step"]
    return [
        Section(
            id="stack",
            title="What each step adds",
            figure=bars.stack_steps(shown, gains, facts.bands),
            caption="A bar is a recipe: it has the techniques of those above it, and one more. The text is its gain "
            "over the one before, with the interval of 95 %. Failed, emulated and oversubscribed recipes have no bar.",
            description=f"Bars of tokens per second by step. {listed(clauses)}.",
            columns=columns,
            values=by_run("Speed of every run", facts.runs, columns),
            tables=[table("Steps", ["step", "tokens/s per device", "against", "gain"], rows)],
        )
    ]


def scaling_series(facts: Facts) -> dict[str, list[dict[str, Any]]]:
    """Recipes that differ in the number of devices and the layout only, by the kind of scaling."""
    compared = [group for group in facts.groups if not group.is_control and group.rows[0]["global_batch"]]
    series: dict[str, list[dict[str, Any]]] = {}
    for weak, kind in ((True, "weak"), (False, "strong")):
        for family in scaling_families(compared, weak=weak):
            if len({row["world"] for row in family if row["group"].has_speed}) > 1:
                first = family[0]["group"]
                # What is the same for all sizes; without it, two families could have one name.
                shared = [text for text in _words(first) if all(text in _words(row["group"]) for row in family)]
                batch = f"{grouped(first.rows[0]['global_batch'])} sequences on {first.world}"
                name = ", ".join([kind, batch, *shared])
                series[name] = family
    return series


def scaling_texts(facts: Facts) -> list[str]:
    """The efficiency of the most devices in each series: `weak: 91% on 512, of 8`."""
    series = scaling_series(facts)
    kinds = [name.partition(",")[0] for name in series]
    texts = []
    for name, kind, family in zip(series, kinds, series.values(), strict=True):
        sound = [row for row in family if row["group"].has_speed]
        last = max(sound, key=lambda row: (row["world"], row["tokens_per_second"]))
        efficiency = f"{last['efficiency_percent']:.0f}% on {last['world']}, of {family[0]['world']}"
        texts.append(f"{kind if kinds.count(kind) == 1 else name}: {efficiency}")
    return texts


def _scaling(facts: Facts) -> list[Section]:
    series = scaling_series(facts)
    if not series:
        return []
    points = {}
    for name, family in series.items():
        base = family[0]["tokens_per_second"] / family[0]["efficiency_percent"]
        points[name] = [
            growth.GrowthPoint(
                group=row["group"],
                size=row["world"],
                value=row["efficiency_percent"],
                band=_scaled(facts.bands.get(row["recipe"]), base),
            )
            for row in family
        ]
    rows = [
        [
            name,
            row["recipe"],
            row["world"],
            _whole(row["tokens_per_second"]),
            _whole(row["tokens_per_second_all"]),
            row["speedup"],
            row["efficiency_percent"],
        ]
        for name, family in series.items()
        for row in family
    ]
    headings = [
        "scaling",
        "recipe",
        "devices",
        "tokens/s per device",
        "tokens/s in all",
        "times as fast",
        "efficiency %",
    ]
    columns = ["tokens_per_second", "world", "global_batch", "oversubscribed"]
    panel = growth.GrowthPanel(
        label="% of the tokens/s per device of the fewest", column=columns[0], series=points, ideal=100.0
    )
    return [
        Section(
            id="scaling",
            title="Scaling efficiency",
            figure=growth.growth("scaling efficiency", "devices", [panel]),
            caption="100 %: twice the devices do twice the tokens per second. Weak: the same batch a device; strong: "
            "the same batch in all. A line joins the fastest recipes of each number of devices; a bar is the interval "
            f"of 95 % of a recipe's own mean.{_HOLLOW}",
            description=f"Lines of scaling efficiency. {listed(scaling_texts(facts))}.",
            columns=columns,
            values=by_run("Speed of every run", facts.runs, columns),
            tables=[table("Scaling", headings, rows)],
        )
    ]


def _whole(speed: float | None) -> float | None:
    """Tokens per second without decimals, unless they are few."""
    return round(speed) if speed is not None and speed >= 100 else speed


def _scaled(band: tuple[float, float] | None, base: float) -> tuple[float, float] | None:
    return None if band is None else (band[0] / base, band[1] / base)


def _context(facts: Facts) -> list[Section]:
    compared = [group for group in facts.groups if not group.is_control and group.rows[0]["seq_len"]]
    measured = [group for group in compared if group.typical("tokens_per_second")]
    if len({group.rows[0]["seq_len"] for group in measured}) < 2:
        return []
    series: dict[str, list[RecipeRuns]] = {}
    for group in measured:
        series.setdefault(_family(group), []).append(group)
    panels = [
        growth.GrowthPanel(
            label=label,
            column=column,
            series={
                name: [
                    growth.GrowthPoint(
                        group=group,
                        size=group.rows[0]["seq_len"],
                        value=value,
                        band=facts.bands.get(group.label) if is_speed else None,
                    )
                    for group in members
                    if (value := group.typical(column)) is not None
                ]
                for name, members in series.items()
            },
            is_speed=is_speed,
        )
        for column, label, is_speed in (
            ("tokens_per_second", "tokens/s per device", True),
            ("memory_gib", "GiB at the peak", False),
        )
    ]
    ordered = sorted(measured, key=lambda group: group.rows[0]["seq_len"])
    rows = [
        [
            group.label,
            group.rows[0]["seq_len"],
            group.rows[0]["layout.context"],
            *(_whole(group.typical(panel.column)) for panel in panels),
        ]
        for group in ordered
    ]
    columns = ["seq_len", "layout.context", "tokens_per_second", "memory_gib"]
    clauses = [f"{grouped(size)} tokens: {significant(speed, 4)} tokens/s per device" for _, size, _, speed, _ in rows]
    return [
        Section(
            id="context",
            title="Speed and memory against the length of sequences",
            figure=growth.growth("length of sequences", "tokens of a sequence", panels),
            caption="A line joins the best recipes of each length." + _HOLLOW,
            description=f"Lines of speed and memory by length. {listed(clauses)}.",
            columns=columns,
            values=by_run("Speed and memory of every run", facts.runs, columns),
            tables=[
                table("By length", ["recipe", "tokens of a sequence", "context", "tokens/s per device", "GiB"], rows)
            ],
        )
    ]


def _family(group: RecipeRuns) -> str:
    return ", ".join([f"{group.world} devices", *_words(group)])


def _words(group: RecipeRuns) -> list[str]:
    """What tells the recipe from others, besides its length, its batch and its layout."""
    return [
        str(value)
        for name, value in group.differing.items()
        if value is not None and (name == _METHOD or not (name in _FOLLOWING or name.startswith(_KEYS_FOLLOWING)))
    ]

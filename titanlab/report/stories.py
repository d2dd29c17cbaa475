"""The sections that only some sweeps have: the steps of a stack, scaling over devices, growing sequences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.report.analyses import scaling_families, scaling_key
from titanlab.report.facts import Facts
from titanlab.report.figures import bars, growth
from titanlab.report.panels import Section, by_run, listed, table
from titanlab.sweep import POINT, RecipeRuns, percent, sentence_of, state_word
from titanlab.system import grouped, significant

# Columns in which recipes of one series may differ: the batch and the layout change with the length of sequences.
_FOLLOWING = ("seq_len", "global_batch", "microbatch", "schedule", f"{POINT}world", f"{POINT}parallelism")
_KEYS_FOLLOWING = (f"{POINT}training.", f"{POINT}parallelism.")
_METHOD = f"{POINT}parallelism.context_method"
_HOLLOW = " Hollow marks are recipes whose speed says nothing: more processes than cores, or emulated products."


def story_sections(facts: Facts) -> list[Section]:
    """The sections for which the sweep has suitable points; empty: there are none."""
    return [*_stack(facts), *_scaling(facts), *_context(facts)]


def answer_of(facts: Facts) -> str:
    """The ranking's answer in one sentence, and where a growing series loses speed."""
    losses = _losses(facts) if facts.by == "tps" else []
    return "; ".join([sentence_of(facts.ranking).removesuffix("."), *losses]) + "."


def _losses(facts: Facts) -> list[str]:
    """Clauses that say where a series of three sizes or more loses speed, by more than noise.

    They name each size that is slower than the next larger one. If there is no such size, they name the largest loss
    from one size to the next.
    """
    found = []
    for name, family in scaling_series(facts).items():
        # Reversed: the fastest recipe of a size comes last, so the dictionary keeps it.
        groups = {row["world"]: row["group"] for row in reversed(family)}
        found += _losses_of(facts, f"{name.partition(',')[0]} scaling", "devices", "tokens_per_second", groups)
    for members in _by_length(facts).values():
        # Compare FLOP/s, not tokens/s: a token of a longer sequence takes more FLOPs.
        lengths = {group.rows[0]["seq_len"]: group for group in reversed(members)}
        found += _losses_of(facts, "FLOP/s", "tokens", "tflops", lengths)
    return found


def _losses_of(facts: Facts, what: str, unit: str, column: str, groups: Mapping[int, RecipeRuns]) -> list[str]:
    sizes = {}
    for size, group in sorted(groups.items()):
        figure, speed, band = group.typical(column), group.typical("tokens_per_second"), facts.bands.get(group.label)
        if figure and speed and band:
            sizes[size] = [end * figure / speed for end in band]
    steps = []
    for (size, ends), (larger, others) in itertools.pairwise(sizes.items()):
        if max(ends[0], others[0]) > min(ends[1], others[1]):
            steps.append((100 * (sum(others) / sum(ends) - 1), size, larger))
    if len(sizes) < 3 or not steps:
        return []
    dips = [
        f"{what} is {percent(change)} better on {grouped(larger)} {unit} than on {grouped(size)}"
        for change, size, larger in steps
        if change > 0
    ]
    change, size, larger = min(steps)
    return dips or [f"{what} loses most from {grouped(size)} to {grouped(larger)} {unit}: {percent(change)}"]


def _stack(facts: Facts) -> list[Section]:
    entries = [entry for entry in facts.speeds.entries if entry.group.rows[0].get("stack_step") is not None]
    if len(entries) < 2:
        return []
    entries.sort(key=lambda entry: entry.group.rows[0]["stack_step"])
    steps = {step.entry.label: step for step in facts.speeds.steps}
    rows, gains = [], dict[str, str]()
    for entry in entries:
        gain = ["", "" if entry.left_out is None else f"no place: {entry.left_out}"]
        if (step := steps.get(entry.label)) is not None:
            gain = [step.before.label, step.gain_text]
            # Beside a bar there is room for the numbers only.
            numbers = step.gain_text.partition(", ")[0].replace("95% interval ", "")
            gains[entry.label] = numbers + ("" if step.is_next else " in all")
        rows.append([entry.label, _whole(entry.group.typical("tokens_per_second")), *gain])
    clauses = [f"{label} {step.gain_text}" for label, step in steps.items()]
    columns = ["tokens_per_second", "stack_step"]
    return [
        Section(
            id="stack",
            title="What each step adds",
            figure=bars.stack_steps([entry.group for entry in entries if entry.left_out is None], gains, facts.bands),
            caption="A bar is a recipe: it has the techniques of those above it, and one more. The text is its gain "
            "over the one before, with the interval of 95 %. Failed, emulated and oversubscribed recipes have no bar; "
            "the gain after one of them is that of both steps in all.",
            description=f"Bars of tokens per second by step. {listed(clauses) or 'No step can be compared'}.",
            columns=columns,
            values=by_run("Speed of every run", facts.runs, columns),
            tables=[table("Steps", ["step", "tokens/s per device", "against", "gain"], rows)],
        )
    ]


def scaling_series(facts: Facts) -> dict[str, list[dict[str, Any]]]:
    """By name of a series, rows of recipes that differ only in the number of devices and the layout."""
    compared = [group for group in facts.groups if not group.is_control and group.rows[0]["global_batch"]]
    series: dict[str, list[dict[str, Any]]] = {}
    for weak, kind in ((True, "weak"), (False, "strong")):
        for family in scaling_families(compared, weak=weak):
            if len({row["world"] for row in family if row["group"].has_speed}) > 1:
                first = family[0]["group"]
                # Words that hold for all sizes: without them, two families could have the same name.
                shared = [text for text in _words(first) if all(text in _words(row["group"]) for row in family)]
                batch = f"{grouped(first.rows[0]['global_batch'])} sequences on {first.world}"
                name = ", ".join([kind, batch, *shared])
                series[name] = family
    return series


def _unmeasured(facts: Facts, name: str, family: Sequence[Mapping[str, Any]]) -> list[RecipeRuns]:
    """The recipes that a series lacks, because no run of them is done."""
    weak = name.startswith("weak")
    key = scaling_key(family[0]["group"], weak=weak)
    compared = (group for group in facts.groups if not group.is_control and group.rows[0]["global_batch"])
    return [
        group for group in compared if not group.typical("tokens_per_second") and scaling_key(group, weak=weak) == key
    ]


def scaling_texts(facts: Facts) -> list[str]:
    """The efficiency on the most devices of each series, relative to the fewest: `weak: 91% on 512, of 8`."""
    series = scaling_series(facts)
    kinds = [name.partition(",")[0] for name in series]
    texts = []
    for name, kind, family in zip(series, kinds, series.values(), strict=True):
        sound = [row for row in family if row["group"].has_speed]
        last = max(sound, key=lambda row: (row["world"], row["tokens_per_second"]))
        efficiency = f"{last['efficiency_percent']:.0f}% on {last['world']}, of {family[0]['world']}"
        lacking = sorted({group.world for group in _unmeasured(facts, name, family)} - {row["world"] for row in sound})
        none = f" (no run done on {', '.join(map(grouped, lacking))})" if lacking else ""
        texts.append(f"{kind if kinds.count(kind) == 1 else name}: {efficiency}{none}")
    return texts


def _scaling(facts: Facts) -> list[Section]:
    series = scaling_series(facts)
    if not series:
        return []
    points: dict[str, list[growth.GrowthPoint]] = {}
    rows, unmeasured = [], []
    for name, family in series.items():
        base, points[name] = family[0]["tokens_per_second"] / family[0]["efficiency_percent"], []
        for row in family:
            group, band, speed = row["group"], facts.bands.get(row["recipe"]), row["tokens_per_second"]
            scaled = None if band is None else (band[0] / base, band[1] / base)
            points[name].append(growth.GrowthPoint(group, row["world"], row["efficiency_percent"], scaled))
            figures = [_whole(speed), _whole(row["tokens_per_second_all"]), row["speedup"], row["efficiency_percent"]]
            rows.append([name, group.label, row["world"], *figures, _ends(group)])
        for group in _unmeasured(facts, name, family):
            points[name].append(growth.GrowthPoint(group, group.world, None))
            unmeasured.append([name, group.label, group.world, *([None] * 4), _ends(group)])
    headings = ["scaling", "recipe", "devices", "tokens/s per device", "tokens/s in all", "times as fast"]
    columns = ["tokens_per_second", "world", "global_batch", "oversubscribed"]
    label = "% of the tokens/s per device of the fewest"
    panel = growth.GrowthPanel(label=label, column=columns[0], series=points, ideal=100.0)
    return [
        Section(
            id="scaling",
            title="Scaling efficiency",
            figure=growth.growth("scaling efficiency", "devices", [panel]),
            caption="100 %: twice the devices do twice the tokens per second. Weak: the same batch a device; strong: "
            "the same batch in all. A line joins the fastest recipes of each number of devices; a bar is the interval "
            f"of 95 % of a recipe's own mean.{_HOLLOW}{_crosses(points)}",
            description=f"Lines of scaling efficiency. {listed(scaling_texts(facts))}.",
            columns=columns,
            values=by_run("Speed of every run", facts.runs, columns),
            tables=[table("Scaling", [*headings, "efficiency %", "outcomes"], [*rows, *unmeasured])],
        )
    ]


def _ends(group: RecipeRuns) -> str:
    """How the runs ended: `2 done, 1 oom`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(map(state_word, group.rows)).items())


def _crosses(series: Mapping[str, Sequence[growth.GrowthPoint]]) -> str:
    """A sentence that says what crosses mean; empty: there are none."""
    is_crossed = any(point.value is None for points in series.values() for point in points)
    return " A cross is a recipe of which no run is done: the line has a gap there." if is_crossed else ""


def _whole(speed: float | None) -> float | None:
    """Tokens per second, without decimals from 100 upwards."""
    return round(speed) if speed is not None and speed >= 100 else speed


def _by_length(facts: Facts) -> dict[str, list[RecipeRuns]]:
    """By name of a series, recipes that differ only in the length of sequences and what changes with it."""
    compared = [group for group in facts.groups if not group.is_control and group.rows[0]["seq_len"]]
    series: dict[str, list[RecipeRuns]] = {}
    if len({group.rows[0]["seq_len"] for group in compared}) > 1:
        for group in compared:
            series.setdefault(", ".join([f"{group.world} devices", *_words(group)]), []).append(group)
    return series


def _context(facts: Facts) -> list[Section]:
    series = _by_length(facts)
    compared = [group for members in series.values() for group in members]
    if not any(group.typical("tokens_per_second") for group in compared):
        return []
    # Sort by length; within a length the fastest first, as in the whole report.
    compared.sort(key=lambda group: (group.rows[0]["seq_len"], facts.groups.index(group)))

    def panel(column: str, label: str, bands: Mapping[str, tuple[float, float]]) -> growth.GrowthPanel:
        points = {
            name: [
                growth.GrowthPoint(group, group.rows[0]["seq_len"], group.typical(column), bands.get(group.label))
                for group in members
            ]
            for name, members in series.items()
        }
        return growth.GrowthPanel(label=label, column=column, series=points, is_speed=column == "tokens_per_second")

    panels = [
        panel("tokens_per_second", "tokens/s per device", facts.bands),
        panel("memory_gib", "GiB at the peak", {}),
    ]
    rows, clauses = [], []
    for group in compared:
        size, ends = group.rows[0]["seq_len"], _ends(group)
        speed, memory = (_whole(group.typical(panel.column)) for panel in panels)
        rows.append([group.label, size, group.rows[0]["layout.context"], speed, memory, ends])
        shown = ends if speed is None else f"{significant(speed, 4)} tokens/s per device"
        clauses.append(f"{grouped(size)} tokens: {shown}")
    columns = ["seq_len", "layout.context", "tokens_per_second", "memory_gib"]
    headings = ["recipe", "tokens of a sequence", "context", "tokens/s per device", "GiB", "outcomes"]
    return [
        Section(
            id="context",
            title="Speed and memory against the length of sequences",
            figure=growth.growth("length of sequences", "tokens of a sequence", panels),
            caption="A line joins the best recipes of each length." + _HOLLOW + _crosses(panels[0].series),
            description=f"Lines of speed and memory by length. {listed(clauses)}.",
            columns=columns,
            values=by_run("Speed and memory of every run", facts.runs, columns),
            tables=[table("By length", headings, rows)],
        )
    ]


def _words(group: RecipeRuns) -> list[str]:
    """The values in which the recipe differs from others, without the length, the batch and the layout."""
    return [
        str(value)
        for name, value in group.differing.items()
        if value is not None and (name == _METHOD or not (name in _FOLLOWING or name.startswith(_KEYS_FOLLOWING)))
    ]

"""`titanlab plan …`: estimate memory and speed of layouts without a GPU, and rank them."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence

from titanlab.cli.arguments import json_text
from titanlab.cli.compose import compose_one
from titanlab.errors import ConfigError
from titanlab.plan import (
    Plan,
    explain,
    explanation_values,
    for_planning,
    memory_rows,
    no_collection,
    plan,
    search,
    time_rows,
    traffic_rows,
)
from titanlab.plan.space import VARIED
from titanlab.recipe import Recipe, read_flags
from titanlab.system import Console, aligned, counted, grouped
from titanlab.techniques.schedule import plot

# How many recipes a table shows.
_TOP = 20
# Kind of answer → the flags that go with it. The first kind ranks layouts; the others have a flag of their name.
_TAKES = {
    "": ("top", "why", "vary", "json"),
    "explain": ("plot", "json"),
    "trace": ("rank", "json"),
    "calibrate": ("out", "runs"),
    "measure": ("out",),
}


def plan_verb(args: Namespace) -> int:
    """Returns 0; 2 if no layout fits; 1 if a trace differs from what the planner declares."""
    _check(args)
    if args.measure:
        # Imported here, as below: a plan needs neither sweeps nor jobs.
        from titanlab.cli.plan_runs import measure

        return measure(args.rest, out=args.out)
    if args.calibrate is not None:
        from titanlab.cli.plan_runs import calibrate_sweep

        with Console() as console:
            calibrate_sweep(args.calibrate, runs=args.runs or "runs", out=args.out, console=console)
        return 0
    if args.trace:
        recipe = for_planning(_recipe(args.rest), stands=True)
        with Console() as console:
            return _trace(recipe, args.rank, console, as_json=args.json)
    with no_collection():
        recipe = _recipe(args.rest)
        with Console() as console:
            if args.explain:
                code = _explain(for_planning(recipe, stands=True), args, console)
            else:
                code = _plan(recipe, args, console)
        # Without this line, Python would look through all objects of the search at its exit, for a tenth of a second.
        gc.freeze()
    return code


def _varied(text: str) -> dict[str, list[str]]:
    """Group → its options to vary, from `precision,cluster=h100,h200`; an empty list stands for all options."""
    groups: dict[str, list[str]] = {}
    for part in text.split(",") if text else ():
        group, equals, option = part.partition("=")
        if equals or not groups or group in VARIED:
            groups[group] = [option] if equals else []
        else:
            groups[next(reversed(groups))].append(part)
    if "cluster" in groups and not all(groups["cluster"] or [""]):
        raise ConfigError("--vary", text, "names no machines", "try cluster=a100_80gb,h100,h200")
    return groups


def _plan(recipe: Recipe, args: Namespace, console: Console) -> int:
    """Plan for the recipe's machine, or for each that --vary names."""
    clusters = args.vary.pop("cluster", [])
    # A group that cannot vary gets no options here: `plan` refuses the group itself.
    vary = {
        group: [getattr(_recipe([*args.rest, f"{group}={option}"]), group) for option in options if group in VARIED]
        for group, options in args.vary.items()
    }
    top = (1 if clusters else _TOP) if args.top is None else args.top
    recipes = {name: _recipe([*args.rest, f"cluster={name}"]) for name in dict.fromkeys(clusters)} or {"": recipe}
    plans = {name: plan(for_planning(each), vary=vary, top=top) for name, each in recipes.items()}
    if args.json:
        values = {name: search.plan_values(each) for name, each in plans.items()}
        console.note(json_text(values if clusters else values[""]))
    elif not clusters:
        console.note("\n".join(_lines(plans[""], why=args.why)))
    else:
        lines = []
        for name, each in plans.items():
            lines += [f"{name}: {search.title(each)}", *each.ranking.machine.notes]
        lines += search.not_priced(recipe)
        lines += aligned(("cluster", *search.HEADINGS[1:]), search.machine_rows(plans), right=search.FIGURES)
        for name, each in plans.items():
            if each.best:
                lines.append(f"the first on {name}: {' '.join(search.overrides(each.best[0], each.base))}")
            if args.why:
                lines += ["", name, *(search.reasons(each.best) if each.best else each.advice), *search.left_out(each)]
        console.note("\n".join(lines))
    return 0 if any(each.best for each in plans.values()) else ConfigError.exit_code


def _check(args: Namespace) -> None:
    # Compare with `is not`: 0 equals False, but a flag with the value 0 is given.
    given = {name: value for name, value in vars(args).items() if value not in (None, "") and value is not False}
    kind, *others = [name for name in _TAKES if name in given] or [""]
    if others:
        raise ConfigError(f"--{kind}", given[kind], f"excludes --{others[0]}", "leave one out")
    for name, value in given.items():
        if name not in (kind, "rest", *_TAKES[kind]):
            owners = [f"--{other}" if other else "a plan of many layouts" for other in _TAKES if name in _TAKES[other]]
            rule = f"goes with {' or '.join(owners)}"
            raise ConfigError(f"--{name}", value, rule, "leave it out" if kind else f"add {owners[0]}")
    if kind == "calibrate" and args.rest:
        rule = "is not for --calibrate, which takes recipes and cluster from the runs"
        raise ConfigError("arguments", " ".join(args.rest), rule, "leave it out")
    args.vary = _varied(args.vary)


def _recipe(arguments: Sequence[str]) -> Recipe:
    flags = read_flags(arguments)
    if flags.answer:
        raise ConfigError("arguments", " ".join(arguments), "plan has no such flag", "see `titanlab plan --help`")
    composition = compose_one(flags)
    if composition is None:
        rule = "ask for several recipes, and a plan begins with one"
        raise ConfigError("arguments", " ".join(arguments), rule, "try titanlab sweep … --dry-run")
    return composition[1]


def _lines(result: Plan, *, why: bool) -> list[str]:
    lines = [search.title(result), *result.ranking.machine.notes, *search.not_priced(result.base)]
    if not result.best:
        return [*lines, "no layout works", *result.advice, *search.left_out(result)]
    lines += aligned(search.HEADINGS, search.table_rows(result), right=search.FIGURES)
    lines.append(f"the first: {' '.join(search.overrides(result.best[0], result.base))}")
    if near := search.closeness(result):
        lines.append(near)
    if why:
        lines += ["", *search.reasons(result.best), "", *search.left_out(result)]
    return lines


def _explain(recipe: Recipe, args: Namespace, console: Console) -> int:
    account = explain(recipe)
    time, timeline = account.time, account.timeline
    if args.plot is not None:
        if timeline is None:
            raise ConfigError("--plot", args.plot, "draws a pipeline, and pipeline=1", "leave it out")
        plot.draw([(f"{recipe.schedule.kind} · bubble {100 * timeline.bubble_share:.1f} %", timeline)], args.plot)
    if args.json:
        console.note(json_text(explanation_values(account)))
        return 0
    headings, rows = memory_rows(account)
    batches = f"{counted(recipe.microbatches, 'microbatch', 'microbatches')} of {recipe.microbatch}"
    lines = [
        f"{recipe.name}: {recipe.layout.label} on {account.machine.name}, {batches}",
        "",
        *aligned(headings, rows, right=headings[1:]),
        "",
        *aligned(("part", "seconds", "share"), time_rows(time), right=("seconds", "share")),
        f"{grouped(time.tokens_per_second)} tokens/s a device, MFU {100 * time.mfu:.1f} %",
        str(search.whole_model(recipe)),
        *search.not_priced(recipe),
    ]
    if account.traffic:
        figures = ("count", "bytes", "sent")
        lines += ["", *aligned(("axis", "collective", *figures), traffic_rows(account.traffic), right=figures)]
    if timeline is not None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 110
        peaks = " ".join(f"{peak:.3g}" for peak in timeline.peak_in_flight)
        lines += [
            "",
            *plot.rows(timeline, width=width, coloured=False),
            "",
            f"bubble          {100 * timeline.bubble_share:.1f} % of all ranks' time",
            f"peak in flight  {peaks} microbatches, by rank",
        ]
    console.note("\n".join(lines))
    if args.plot is not None:
        console.note(f"plot: {args.plot}")
    return 0


def _trace(recipe: Recipe, ranks: str, console: Console, *, as_json: bool) -> int:
    """Trace, print the table, and return 0 if all figures are equal, else 1.

    Args:
        ranks: numbers with commas between them; empty: the first rank of each pipeline stage.
    """
    # Imported here: a plan without a trace does not need it.
    from titanlab.costs import traffic_lines
    from titanlab.prove import comparison_rows, comparison_values, trace

    try:
        numbers = [int(part) for part in ranks.split(",")] if ranks else None
    except ValueError:
        raise ConfigError("--rank", ranks, "must be whole numbers with commas between them", "try --rank 0") from None
    comparison = trace(recipe, numbers)
    items, differing = comparison.items, comparison.differing
    if as_json:
        console.note(json_text(comparison_values(comparison)))
        return 1 if differing else 0
    recipe, figures = comparison.recipe, ("declared", "traced", "difference")
    lines = [f"{recipe.name}: {recipe.layout.label}, one step of {counted(len(comparison.pairs), 'rank')} traced"]
    table = aligned(("rank", "item", *figures), comparison_rows(items), right=("rank", *figures))
    lines += [*comparison.notes, "", *table, ""]
    for _, traced in comparison.pairs:
        undeclared = f"the optimizer of rank {traced.rank}, for which nothing is declared"
        lines += [f"{undeclared}: {line}" for line in traffic_lines(traced.update_traffic)]
    places = ", ".join(f"rank {item.rank}: {item.name}" for item in differing[:5])
    more = f", and {len(differing) - 5} more" if len(differing) > 5 else ""
    end = f"{len(differing)} of {len(items)} figures differ: {places}{more}"
    console.note("\n".join([*lines, end if differing else f"all {len(items)} figures are equal"]))
    return 1 if differing else 0

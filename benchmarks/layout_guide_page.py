"""The tables of docs/choosing-a-layout.md, from the results of layout_guide.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.system import grouped, significant

WITHOUT_PIPELINE = ("1D", "2D", "3D")
WITH_PIPELINE = ("2D with PP", "3D with PP", "4D")
KINDS = (*WITHOUT_PIPELINE, *WITH_PIPELINE)
# The median error of estimated throughput, rounded: another dimension has to gain more than this.
WORTH = 0.05
# What a pipeline has to gain: the estimates of published runs with a pipeline are too fast, by 17 % at most.
WORTH_OF_PIPELINE = 0.2
_HEADS = "1D | 2D | 3D | 2D with PP | 3D with PP | 4D"
_PARTS = 3

Values = dict[str, Any]
Best = Mapping[str, Values]


def page(text: str, kept: Values) -> str:
    """The page with its marked parts as the results are; the words around them stay.

    Raises:
        ValueError: the page lacks a part.
    """
    for name, part in parts(kept).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- {name} end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no part {name}")
        text = f"{before}{begin}{part}\n{end}{after}"
    return text


def parts(kept: Values) -> dict[str, str]:
    """The marked parts of the page by their names."""
    found = {"example": f"```\n$ {kept['command']}\n{kept['example']}\n```"}
    for name, rows in kept["studies"].items():
        found[name] = _summary(rows)
        found[f"{name} in full"] = _in_full(rows)
    found["recipes"] = _recipes(kept["recipes"])
    found["machines"] = _machines(kept["machines"])
    found["changes"] = _changes(kept["changes"])
    found["measured"] = _measured(kept["measured"])
    return found


def taken(best: Best) -> str:
    """The kind to take; empty: nothing fits.

    Without a pipeline, the fewest dimensions that are as fast as more of them within `WORTH`; a pipeline only if
    nothing else fits, or if it gains more than `WORTH_OF_PIPELINE`.
    """
    plain, piped = _simplest(best, WITHOUT_PIPELINE), _simplest(best, WITH_PIPELINE)
    if not plain or not piped:
        return plain or piped
    return piped if _speed(best[piped]) > (1 + WORTH_OF_PIPELINE) * _speed(best[plain]) else plain


def _simplest(best: Best, kinds: Sequence[str]) -> str:
    most = max(_speed(best[kind]) for kind in kinds)
    return next((kind for kind in kinds if _speed(best[kind]) >= (1 - WORTH) * most), "") if most else ""


def _speed(values: Values) -> float:
    return float(values.get("tokens_per_second", 0.0))


def _summary(rows: Sequence[Values]) -> str:
    """Tokens a second of one GPU by sequence, world and kind; what to take."""
    lines = [
        [f"{one['seq_len']:,}", f"{one['sequences']:,}", f"{one['gpus']:,}", *_speeds(one["best"])] for one in rows
    ]
    return _table(f"| sequence | sequences a step | GPUs | {_HEADS} | take |", lines)


def _speeds(best: Best) -> list[str]:
    kind = taken(best)
    advice = f"{kind.partition(' ')[0]}: {best[kind]['layout']}" if kind else "nothing fits"
    return [*(best[kind].get("none") or grouped(_speed(best[kind])) for kind in KINDS), advice]


def _in_full(rows: Sequence[Values]) -> str:
    """Every layout that fits."""
    lines = [
        [f"{one['seq_len']:,}", f"{one['gpus']:,}", kind, *_cells(one["best"][kind])]
        for one in rows
        for kind in KINDS
        if "none" not in one["best"][kind]
    ]
    head = "| sequence | GPUs | kind | layout | schedule | mb | AC | GB | step | tok/s/GPU | where the time goes |"
    return _table(head, lines)


def _cells(values: Values) -> list[str]:
    shares = sorted(values["parts"].items(), key=lambda part: -part[1])[:_PARTS]
    return [
        values["layout"],
        values["schedule"],
        str(values["microbatch"]),
        values["ac"],
        f"{values['reserved_gb']:.0f}",
        f"{significant(values['step_seconds'], 3)} s",
        grouped(values["tokens_per_second"]),
        ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares if share >= 0.01),
    ]


def _changes(rows: Sequence[Values]) -> str:
    lines = [
        [one["row"] if not one["change"] else "", one["change"] or "as above", *_speeds(one["best"])] for one in rows
    ]
    return _table(f"| row | change | {_HEADS} | take |", lines)


def _recipes(rows: Sequence[Values]) -> str:
    """Recipes as they stand, each with the planner's first for its GPUs and batch."""
    lines = []
    for one in rows:
        first, speed = one["first"], one["tokens_per_second"]
        gain = first["tokens_per_second"] / speed - 1
        better = f"{first['layout']}: {grouped(first['tokens_per_second'])}" if gain > WORTH else "as good"
        on_hosts = " launch=slurm cluster=h100" if one["gpus"] > 8 else ""
        lines.append(
            [
                one["model"],
                f"{one['gpus']:,}",
                one["layout"],
                one["precision"],
                f"`titanlab train +recipe={one['recipe']}{on_hosts}`",
                grouped(float(significant(speed * one["gpus"], 3))),
                grouped(speed),
                f"{100 * one['mfu']:.0f} %",
                f"{one['reserved_gb']:.0f}",
                better,
            ]
        )
    head = "| model | GPUs | layout | precision | command | tokens/s | tok/s/GPU | MFU | GB | the planner's first |"
    return _table(head, lines)


def _machines(cases: Mapping[str, Mapping[str, Values]]) -> str:
    """The planner's first on each machine."""
    lines = []
    for cluster in next(iter(cases.values())):
        cells = [f"`cluster={cluster}`"]
        for machines in cases.values():
            best = machines[cluster]
            shown = "nothing fits"
            if best:
                schedule = f", {best['schedule']}" if best["schedule"] else ""
                speed = f"{grouped(best['tokens_per_second'])}, {100 * best['mfu']:.0f} %"
                shown = f"{best['layout']}{schedule}, {best['ac']}: {speed}"
            cells.append(shown)
        lines.append(cells)
    return _table(f"| | {' | '.join(cases)} |", lines)


def _measured(rows: Sequence[Values]) -> str:
    lines = []
    for one in rows:
        speed = one["tokens_per_second"]
        cells = [f"`{one['recipe']}`", one["layout"], f"{one['seq_len']:,}", one["schedule"]]
        cells += ["yes" if one["async_tensor"] else "", str(one["measured"]), significant(speed)]
        error = round(100 * (speed / one["measured"] - 1))
        lines.append([*cells, f"{error:+d} %" if error else "0 %"])
    return _table("| recipe | layout | sequence | schedule | AsyncTP | measured | estimate | error |", lines)


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])

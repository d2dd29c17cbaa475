"""What the session is for, and what the measured rates of products and attention say of what is missing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpu_session.bound import Bound, bound_of
from gpu_session.cells import NONE, head, line, number
from gpu_session.measure import MEASURED
from gpu_session.prediction import Facts, composed, peak_of
from gpu_session.rows import Row
from gpu_session.sizes import WHOLE_LAYERS

AIM_MFU, AIM_FLOAT8 = 68.0, 1.35
Entries = Mapping[str, Mapping[str, Any]]


def aims(order: Sequence[Row], entries: Entries, facts: Facts) -> Iterator[str]:
    """The two figures that the session is for, and what explains what is missing."""
    yield "## Aims"
    yield ""
    bf16 = _best(_runs(entries, "precision=bf16"))
    full = _best(_runs(entries, "precision=bf16_full"))
    if bf16 is None:
        yield f"- {AIM_MFU:.0f} % MFU in bf16: no row in bf16 was measured."
    else:
        share = bf16["figures"].get("mfu_percent")
        missing = "not known" if share is None else _verdict(share, AIM_MFU, "{:.1f} points missing")
        yield f"- {AIM_MFU:.0f} % MFU in bf16: best is {number(share, '{:.1f} %')}, `{bf16['row']}`: {missing}."
        yield from _reason(order, entries, facts, bf16)
    if full is not None:
        share = full["figures"].get("mfu_percent")
        yield f"- With parameters that are stored in bf16: best is {number(share, '{:.1f} %')}, `{full['row']}`."
    yield from _float8(order, entries, facts)


def _float8(order: Sequence[Row], entries: Entries, facts: Facts) -> Iterator[str]:
    """How much faster float8 is than bf16 with as many sequences a step."""
    pairs = []
    for float8 in _runs(entries, "precision=float8_*"):
        other = _best(each for each in _runs(entries, "precision=bf16") if _sequences(each) == _sequences(float8))
        if other is not None:
            pairs.append((_speed(float8) / _speed(other), float8, other))
    if not pairs:
        yield f"- {AIM_FLOAT8} × in float8: no row in float8 was measured beside one in bf16 with as many sequences."
        return
    times, float8, other = max(pairs, key=lambda pair: pair[0])
    missing = _verdict(times, AIM_FLOAT8, "{:.2f} missing")
    yield f"- {AIM_FLOAT8} × in float8: best is {times:.2f} ×, `{float8['row']}` over `{other['row']}`: {missing}."
    yield from _reason(order, entries, facts, float8)


def _verdict(value: float, aim: float, missing: str) -> str:
    return "reached" if value >= aim else missing.format(aim - value)


def _reason(order: Sequence[Row], entries: Entries, facts: Facts, run: Mapping[str, Any]) -> Iterator[str]:
    """What products and attention allow a row, and what the rest of its step costs."""
    row = next(each for each in order if each.name == run["row"])
    measured, seconds = measured_rates(entries), run["figures"].get("step_seconds")
    recipe = composed(row.keys, facts)
    bound = bound_of(recipe, measured, peak=peak_of(recipe, facts))
    if bound is None or not seconds:
        return
    rest = 100 * (1 - bound.seconds / seconds)
    allowed = f"{recipe.tokens_per_step / bound.seconds:,.0f} tokens/s, {number(bound.mfu_percent, '{:.1f} %')}"
    yield f"  - Its products and attention alone would be {allowed}; all else takes {rest:.1f} % of its step."


def _runs(entries: Entries, key: str) -> Iterator[Mapping[str, Any]]:
    """The runs that were measured whole with a key; a run that failed early may have been fast."""
    for entry in entries.values():
        is_whole = entry.get("kind") == "run" and entry["status"] == MEASURED and _speed(entry) > 0
        if is_whole and fnmatch.filter(entry["keys"], key):
            yield entry


def _best(runs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest of them."""
    return max(runs, key=_speed, default=None)


def _speed(entry: Mapping[str, Any]) -> float:
    return float(entry.get("figures", {}).get("tokens_per_second") or 0.0)


def _sequences(entry: Mapping[str, Any]) -> str | None:
    """The key that says how many sequences a step has."""
    return next((key for key in entry["keys"] if key.startswith("training.global_batch=")), None)


def measured_rates(entries: Entries) -> Mapping[str, Any]:
    figures: Mapping[str, Any] = entries.get("products/all", {}).get("figures", {})
    return figures


def bounds(order: Sequence[Row], entries: Entries, facts: Facts) -> Iterator[str]:
    """What the products allow, and what is left for everything else."""
    yield "## What products and attention allow"
    yield ""
    yield "The seconds of a step's matrix products and attention at the rates below; the rest of the step is norms, "
    yield "rotations, casts, the loss, the optimizer, and gaps between kernels. The last column is the bound of all "
    yield f"{WHOLE_LAYERS} layers of the model, in which the head weighs less."
    yield ""
    measured = measured_rates(entries)
    headings = "row, step s, products s, attention s, rest s, rest, MFU, MFU at most, speed at most"
    yield from head([*headings.split(", "), f"MFU at most, {WHOLE_LAYERS} layers"])
    for row in order:
        figures = entries.get(row.name, {}).get("figures", {})
        if row.kind != "run" or not figures.get("step_seconds"):
            continue
        recipe = composed(row.keys, facts)
        peak = peak_of(recipe, facts)
        bound = bound_of(recipe, measured, peak=peak)
        whole = bound_of(recipe, measured, peak=peak, layers=WHOLE_LAYERS)
        yield _bound_line(row.name, figures, bound, whole, recipe.tokens_per_step)


def _bound_line(name: str, figures: Mapping[str, Any], bound: Bound | None, whole: Bound | None, tokens: int) -> str:
    step = figures["step_seconds"]
    if bound is None:
        return line(name, f"{step:.4g}", *[NONE] * 8)
    rest = step - bound.seconds
    return line(
        name,
        f"{step:.4g}",
        f"{bound.products:.4g}",
        f"{bound.attention:.4g}",
        f"{rest:.4g}",
        f"{100 * rest / step:.1f} %",
        number(figures.get("mfu_percent"), "{:.1f} %"),
        number(bound.mfu_percent, "{:.1f} %"),
        f"{tokens / bound.seconds:,.0f}",
        number(None if whole is None else whole.mfu_percent, "{:.1f} %"),
    )

"""The result of a session as one page of Markdown: what was measured, beside what the planner says."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_session.bound import Bound, bound_of
from gpu_session.measure import MEASURED
from gpu_session.prediction import Facts, composed
from gpu_session.rows import Row
from gpu_session.sizes import WHOLE_LAYERS, Sizes
from titanlab.costs import hardware

AIM_MFU, AIM_FLOAT8 = 68.0, 1.35
_NONE = "–"
Found = Mapping[str, Mapping[str, Any]]


def page(order: Sequence[Row], rows: Sequence[Mapping[str, Any]], facts: Facts, sizes: Sizes) -> str:
    """The whole page."""
    found = {row["row"]: row for row in rows}
    lines = [*_heading(rows, facts, sizes), "", *_runs(order, found, facts), "", *_aims(found), ""]
    lines += [*_bounds(order, found, facts), "", *_memory(order, found), "", *_saves(order, found), ""]
    lines += [*_tests(found), "", *_rates(found, facts), "", *_kernels(order, found), "", *_missing(order, found)]
    return "\n".join(_without_gaps(lines)) + "\n"


def _heading(rows: Sequence[Mapping[str, Any]], facts: Facts, sizes: Sizes) -> list[str]:
    stamp = rows[0] if rows else {}
    minutes = sum(row.get("wall_seconds", 0) for row in rows) / 60
    memory = f", {facts.memory_bytes / 1e9:.1f} GB" if facts.memory_bytes else ""
    where = f"{facts.device}{memory}, torch {facts.torch}"
    sizes_said = (
        f"{sizes.layers} layers of `{sizes.model}`, vocabulary {sizes.vocabulary:,}, "
        f"sequences of {sizes.seq:,} tokens, one in a microbatch."
    )
    made = f"code {stamp.get('code', '?')}, commit {stamp.get('commit') or 'not known'}"
    return ["# GPU session", "", f"{where}; {made}; {len(rows)} rows, {minutes:.1f} minutes. {sizes_said}"]


def _runs(order: Sequence[Row], found: Found, facts: Facts) -> Iterator[str]:
    """A line for each run of the trainer."""
    on_cpu = facts.device == "cpu"
    yield "## Speed and memory"
    yield ""
    yield "Predictions are the planner's for the same recipe; GB are 10⁹ bytes that the allocator reserved" + (
        ", here the process's resident memory." if on_cpu else "."
    )
    yield ""
    columns = "row, what, tokens/s, TFLOP/s, MFU, step s, GB, planner tokens/s, MFU, GB, speed ÷ planner, GB ÷ planner"
    yield from _head([*columns.split(", "), "MHz", "W"])
    for row in order:
        if row.kind != "run":
            continue
        said = found.get(row.name, {})
        figures, planned, watched = said.get("figures", {}), said.get("predicted", {}), said.get("watched", {})
        size = figures.get("reserved_bytes") or figures.get("resident_bytes")
        speed = figures.get("tokens_per_second")
        yield _line(
            row.name,
            row.what,
            _number(speed, "{:,.0f}"),
            _number(figures.get("tflops"), "{:.1f}"),
            _number(figures.get("mfu_percent"), "{:.1f} %"),
            _spread(figures),
            _number(size, "{:.2f}", 1e9),
            _number(planned.get("tokens_per_second"), "{:,.0f}"),
            _number(planned.get("mfu_percent"), "{:.1f} %"),
            _number(planned.get("reserved_bytes"), "{:.2f}", 1e9),
            _ratio(speed, planned.get("tokens_per_second")),
            _ratio(size, planned.get("reserved_bytes")),
            _number(watched.get("mhz"), "{:.0f}"),
            _number(watched.get("watts"), "{:.0f}"),
        )


def _aims(found: Found) -> Iterator[str]:
    """The two figures that the session is for."""
    yield "## Aims"
    yield ""
    bf16 = _best(found, "precision=bf16", "precision=bf16_full")
    if bf16 is None:
        yield f"- {AIM_MFU:.0f} % MFU in bf16: no row in bf16 was measured."
    else:
        name, figures = bf16
        share = figures.get("mfu_percent")
        verdict = "not known" if share is None else "reached" if share >= AIM_MFU else f"{AIM_MFU - share:.1f} missing"
        yield f"- {AIM_MFU:.0f} % MFU in bf16: best is {_number(share, '{:.1f} %')}, `{name}`: {verdict}."
    float8 = _best(found, "precision=float8_")
    if bf16 is None or float8 is None:
        yield f"- {AIM_FLOAT8} × in float8: a row in bf16 or in float8 is missing."
        return
    ratio = float8[1]["tokens_per_second"] / bf16[1]["tokens_per_second"]
    verdict = "reached" if ratio >= AIM_FLOAT8 else f"{AIM_FLOAT8 - ratio:.2f} missing"
    yield f"- {AIM_FLOAT8} × in float8: best is {ratio:.2f} ×, `{float8[0]}` over `{bf16[0]}`: {verdict}."


def _best(found: Found, *prefixes: str) -> tuple[str, Mapping[str, Any]] | None:
    """The fastest run whose precision begins with one of these."""
    speeds = {
        name: said["figures"]
        for name, said in found.items()
        if said.get("kind") == "run"
        and said.get("figures", {}).get("tokens_per_second")
        and any(key.startswith(prefixes) for key in said["keys"])
    }
    name = max(speeds, key=lambda each: speeds[each]["tokens_per_second"], default=None)
    return None if name is None else (name, speeds[name])


def _bounds(order: Sequence[Row], found: Found, facts: Facts) -> Iterator[str]:
    """What the products allow, and what is left for everything else."""
    yield "## What products and attention allow"
    yield ""
    yield "The seconds of a step's matrix products and attention at the rates below; the rest of the step is norms, "
    yield "rotations, casts, the loss, the optimizer, and gaps between kernels. The last column is the bound of all "
    yield f"{WHOLE_LAYERS} layers of the model, in which the head weighs less."
    yield ""
    measured = found.get("products/all", {}).get("figures", {})
    headings = "row, step s, products s, attention s, rest s, rest, MFU, MFU at most, speed at most"
    yield from _head([*headings.split(", "), f"MFU at most, {WHOLE_LAYERS} layers"])
    for row in order:
        figures = found.get(row.name, {}).get("figures", {})
        if row.kind != "run" or "step_seconds" not in figures:
            continue
        recipe = composed(row.keys, facts)
        peak = hardware.peak_flops(facts.device, recipe.precision.formats().compute)
        bound = bound_of(recipe, measured, peak=peak)
        whole = bound_of(recipe, measured, peak=peak, layers=WHOLE_LAYERS)
        yield _bound_line(row.name, figures, bound, whole, recipe.tokens_per_step)


def _bound_line(name: str, figures: Mapping[str, Any], bound: Bound | None, whole: Bound | None, tokens: int) -> str:
    step = figures["step_seconds"]
    if bound is None:
        return _line(name, f"{step:.4g}", *[_NONE] * 8)
    rest = step - bound.seconds
    return _line(
        name,
        f"{step:.4g}",
        f"{bound.products:.4g}",
        f"{bound.attention:.4g}",
        f"{rest:.4g}",
        f"{100 * rest / step:.1f} %",
        _number(figures.get("mfu_percent"), "{:.1f} %"),
        _number(bound.mfu_percent, "{:.1f} %"),
        f"{tokens / bound.seconds:,.0f}",
        _number(None if whole is None else whole.mfu_percent, "{:.1f} %"),
    )


def _memory(order: Sequence[Row], found: Found) -> Iterator[str]:
    """Each policy of checkpointing beside what it declares."""
    yield "## Activation checkpointing"
    yield ""
    yield "What the blocks keep of one microbatch, and the most that is allocated in a step. What `memory_budget` "
    yield "declares is an upper bound."
    yield ""
    headings = "row, kept GB, declared GB, kept ÷ declared, most GB, planner GB, most ÷ planner, step s"
    yield from _head(headings.split(", "))
    for row in order:
        if row.piece != "memory":
            continue
        said = found.get(row.name, {})
        figures, planned = said.get("figures", {}), said.get("predicted", {})
        # A CPU's allocator has no count, and the process's memory is no measure of a tiny model's.
        most = figures.get("allocated_bytes")
        yield _line(
            row.name,
            _number(figures.get("held_bytes"), "{:.4g}", 1e9),
            _number(planned.get("activation_bytes"), "{:.4g}", 1e9),
            _ratio(figures.get("held_bytes"), planned.get("activation_bytes")),
            _number(most, "{:.4g}", 1e9),
            _number(planned.get("allocated_bytes"), "{:.4g}", 1e9),
            _ratio(most, planned.get("allocated_bytes")),
            _number(figures.get("step_seconds"), "{:.4g}"),
        )


def _saves(order: Sequence[Row], found: Found) -> Iterator[str]:
    """How long the training stands still."""
    yield "## Checkpoints"
    yield ""
    yield "Seconds that the steps up to the next save take longer than steps without one; the first save takes its "
    yield "host memory too."
    yield ""
    yield from _head("row, GB, planner GB, step s, first save s, second save s, second ÷ sync".split(", "))
    sync = _extra(found.get("saves/sync", {}), 1)
    for row in order:
        if row.piece != "saves":
            continue
        said = found.get(row.name, {})
        figures, planned = said.get("figures", {}), said.get("predicted", {})
        saved = figures.get("checkpoint_bytes") or None
        yield _line(
            row.name,
            _number(saved, "{:.4g}", 1e9),
            _number(planned.get("checkpoint_bytes") if saved else None, "{:.4g}", 1e9),
            _number(figures.get("quiet_step_seconds"), "{:.4g}"),
            _number(_extra(said, 0), "{:.3f}"),
            _number(_extra(said, 1), "{:.3f}"),
            _ratio(_extra(said, 1), sync),
        )


def _extra(said: Mapping[str, Any], place: int) -> float | None:
    extra = said.get("figures", {}).get("extra_seconds", [])
    return extra[place] if place < len(extra) else None


def _tests(found: Found) -> Iterator[str]:
    """What the tests say."""
    yield "## Tests"
    yield ""
    figures = found.get("tests/gpu", {}).get("figures", {})
    if not figures:
        yield "They have not run."
        return
    yield f"{figures['passed']} of {figures['tests']} passed, {figures['skipped']} left out or expected to fail."
    for name, message in figures["failed"].items():
        yield f"- `{name}`: {_plain(message)}"


def _rates(found: Found, facts: Facts) -> Iterator[str]:
    """TFLOP/s by shape and format."""
    figures = found.get("products/all", {}).get("figures", {})
    yield "## Matrix products and attention"
    yield ""
    yield "`forward`, `inputs` and `weights` (gradients), tokens × columns × inner of the linear layer."
    yield ""
    yield from _head("what, TFLOP/s, of the peak, ms, MHz, W, °C".split(", "))
    rates = dict(figures.get("rates", {}))
    for kernel, parts in figures.get("attention", {}).items():
        rates.update({f"attention {kernel} {part}": values for part, values in parts.items()})
    for name, values in rates.items():
        # Attention multiplies in bfloat16.
        form = next((word for word in ("float8_tensorwise", "float8_rowwise") if word in name), "bfloat16")
        peak = hardware.peak_flops(facts.device, "float8_e4m3fn" if form.startswith("float8") else "bfloat16")
        yield _line(
            name,
            f"{values['tflops']:.4g}",
            _NONE if peak is None else f"{100e12 * values['tflops'] / peak:.1f} %",
            f"{1e3 * values['seconds']:.4g}",
            _number(values.get("mhz"), "{:.0f}"),
            _number(values.get("watts"), "{:.0f}"),
            _number(values.get("celsius"), "{:.0f}"),
        )
    for name, values in figures.get("memory", {}).items():
        yield _line(
            name, f"{values['bytes_per_second'] / 1e12:.4g} TB/s", _NONE, f"{1e3 * values['seconds']:.4g}", *[_NONE] * 3
        )
    for name, reason in figures.get("failed", {}).items():
        yield _line(name, _plain(reason), *[_NONE] * 5)


def _kernels(order: Sequence[Row], found: Found) -> Iterator[str]:
    """The kernels of a step."""
    yield "## Kernels of a step"
    for row in order:
        kernels = found.get(row.name, {}).get("figures", {}).get("kernels")
        if row.piece != "kernels" or kernels is None:
            continue
        yield ""
        yield f"`{row.name}`: {kernels['seconds']:.4g} s in all"
        yield ""
        yield from _head(["kernel", "ms", "share", "calls"])
        for name, values in kernels["most"].items():
            share = 100 * values["seconds"] / kernels["seconds"] if kernels["seconds"] else 0.0
            yield _line(
                f"`{_plain(name)[:90]}`", f"{1e3 * values['seconds']:.3f}", f"{share:.1f} %", str(values["calls"])
            )


def _missing(order: Sequence[Row], found: Found) -> Iterator[str]:
    """Rows without figures, or with a part of them, and why."""
    yield "## Rows that were not measured whole"
    yield ""
    lines = []
    for row in order:
        said = found.get(row.name)
        if said is None:
            lines.append(_line(row.name, "not run", _NONE))
        elif said["status"] != MEASURED:
            lines.append(_line(row.name, said["status"], _plain(said["reason"])))
    if not lines:
        yield "None."
        return
    yield from _head(["row", "", "why"])
    yield from lines


def _head(names: Sequence[str]) -> list[str]:
    return [_line(*names), _line(*["---"] * len(names))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: object) -> str:
    """Text of others for a cell: one line, without what ends a cell."""
    return " ".join(str(text).replace("|", "/").replace("`", "'").split())[:400]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return _NONE if value is None else form.format(value / unit)


def _ratio(value: float | None, other: float | None) -> str:
    return _NONE if value is None or not other else f"{value / other:.2f}"


def _spread(figures: Mapping[str, Any]) -> str:
    """The median of the steps, and their quartiles."""
    seconds = figures.get("step_seconds_all", [])
    if len(seconds) < 2:
        return _number(figures.get("step_seconds"), "{:.4g}")
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{figures['step_seconds']:.4g} ({low:.4g} to {high:.4g})"


def _without_gaps(lines: Sequence[str]) -> list[str]:
    """The lines without a second empty one after another."""
    return [line for number, line in enumerate(lines) if line or number == 0 or lines[number - 1]]

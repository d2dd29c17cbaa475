"""The result of a session as one page of Markdown: what was measured, beside what the planner says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_session.cells import NONE, head, line, number, plain, ratio, spread
from gpu_session.explanation import Entries, aims, bounds, measured_rates
from gpu_session.measure import MEASURED
from gpu_session.prediction import Facts
from gpu_session.rows import Row
from gpu_session.sizes import Sizes
from titanlab.costs import hardware


def page(order: Sequence[Row], rows: Sequence[Mapping[str, Any]], facts: Facts, sizes: Sizes) -> str:
    """The whole page."""
    entries = {row["row"]: row for row in rows}
    lines = [*_heading(rows, facts, sizes), "", *_runs(order, entries, facts), "", *aims(order, entries, facts), ""]
    lines += [*bounds(order, entries, facts), "", *_memory(order, entries), "", *_saves(order, entries), ""]
    lines += [
        *_tests(entries),
        "",
        *_rates(entries, facts),
        "",
        *_kernels(order, entries),
        "",
        *_missing(order, entries),
    ]
    return "\n".join(_without_gaps(lines)) + "\n"


def _heading(rows: Sequence[Mapping[str, Any]], facts: Facts, sizes: Sizes) -> list[str]:
    stamp = rows[0] if rows else {}
    minutes = sum(row.get("wall_seconds") or 0 for row in rows) / 60
    memory = f", {facts.memory_bytes / 1e9:.1f} GB" if facts.memory_bytes else ""
    where = f"{facts.device}{memory}, torch {facts.torch}"
    sizes_text = (
        f"{sizes.layers} layers of `{sizes.model}`, vocabulary {sizes.vocabulary:,}, "
        f"sequences of {sizes.seq:,} tokens, one in a microbatch."
    )
    made = f"code {stamp.get('code', '?')}, commit {stamp.get('commit') or 'not known'}"
    return ["# GPU session", "", f"{where}; {made}; {len(rows)} rows, {minutes:.1f} minutes. {sizes_text}"]


def _runs(order: Sequence[Row], entries: Entries, facts: Facts) -> Iterator[str]:
    """A line for each run of the trainer."""
    on_cpu = facts.device == "cpu"
    yield "## Speed and memory"
    yield ""
    yield "Predictions are the planner's for the same recipe; GB are 10⁹ bytes that the allocator reserved" + (
        ", here the process's resident memory." if on_cpu else "."
    )
    yield ""
    columns = "row, what, tokens/s, TFLOP/s, MFU, step s, GB, planner tokens/s, MFU, GB, speed ÷ planner, GB ÷ planner"
    yield from head([*columns.split(", "), "MHz", "W"])
    for row in order:
        if row.kind != "run":
            continue
        entry = entries.get(row.name, {})
        figures, planned, watched = entry.get("figures", {}), entry.get("predicted", {}), entry.get("watched", {})
        size = figures.get("reserved_bytes") or figures.get("resident_bytes")
        speed = figures.get("tokens_per_second")
        yield line(
            row.name,
            row.what,
            number(speed, "{:,.0f}"),
            number(figures.get("tflops"), "{:.1f}"),
            number(figures.get("mfu_percent"), "{:.1f} %"),
            spread(figures),
            number(size, "{:.2f}", 1e9),
            number(planned.get("tokens_per_second"), "{:,.0f}"),
            number(planned.get("mfu_percent"), "{:.1f} %"),
            number(planned.get("reserved_bytes"), "{:.2f}", 1e9),
            ratio(speed, planned.get("tokens_per_second")),
            ratio(size, planned.get("reserved_bytes")),
            number(watched.get("mhz"), "{:.0f}"),
            number(watched.get("watts"), "{:.0f}"),
        )


def _memory(order: Sequence[Row], entries: Entries) -> Iterator[str]:
    """Each policy of checkpointing beside what it declares."""
    yield "## Activation checkpointing"
    yield ""
    yield "What the blocks keep of one microbatch, and the most that is allocated in a step. What `memory_budget` "
    yield "declares is an upper bound."
    yield ""
    headings = "row, kept GB, declared GB, kept ÷ declared, most GB, planner GB, most ÷ planner, step s"
    yield from head(headings.split(", "))
    for row in order:
        if row.piece != "memory":
            continue
        entry = entries.get(row.name, {})
        figures, planned = entry.get("figures", {}), entry.get("predicted", {})
        # A CPU's allocator has no count, and the process's memory does not measure a tiny model's.
        most = figures.get("allocated_bytes")
        yield line(
            row.name,
            number(figures.get("held_bytes"), "{:.4g}", 1e9),
            number(planned.get("activation_bytes"), "{:.4g}", 1e9),
            ratio(figures.get("held_bytes"), planned.get("activation_bytes")),
            number(most, "{:.4g}", 1e9),
            number(planned.get("allocated_bytes"), "{:.4g}", 1e9),
            ratio(most, planned.get("allocated_bytes")),
            number(figures.get("step_seconds"), "{:.4g}"),
        )


def _saves(order: Sequence[Row], entries: Entries) -> Iterator[str]:
    """How long the training stands still."""
    yield "## Checkpoints"
    yield ""
    yield "Seconds that the steps up to the next save take longer than steps without one; the first save takes its "
    yield "host memory too."
    yield ""
    yield from head("row, GB, planner GB, step s, first save s, second save s, second ÷ sync".split(", "))
    sync = _extra(entries.get("saves/sync", {}), 1)
    for row in order:
        if row.piece != "saves":
            continue
        entry = entries.get(row.name, {})
        figures, planned = entry.get("figures", {}), entry.get("predicted", {})
        saved = figures.get("checkpoint_bytes") or None
        yield line(
            row.name,
            number(saved, "{:.4g}", 1e9),
            number(planned.get("checkpoint_bytes") if saved else None, "{:.4g}", 1e9),
            number(figures.get("quiet_step_seconds"), "{:.4g}"),
            number(_extra(entry, 0), "{:.3f}"),
            number(_extra(entry, 1), "{:.3f}"),
            ratio(_extra(entry, 1), sync),
        )


def _extra(entry: Mapping[str, Any], place: int) -> float | None:
    extra = entry.get("figures", {}).get("extra_seconds", [])
    return extra[place] if place < len(extra) else None


def _tests(entries: Entries) -> Iterator[str]:
    """What the tests say."""
    yield "## Tests"
    yield ""
    figures = entries.get("tests/gpu", {}).get("figures", {})
    if not figures:
        yield "They have not run."
        return
    others = f"{figures['skipped']} left out or expected to fail"
    yield f"`tests/gpu`: {figures['passed']} of {figures['tests']} passed, {others}."
    for name, message in figures["failed"].items():
        yield f"- `{name}`: {plain(message)}"


def _rates(entries: Entries, facts: Facts) -> Iterator[str]:
    """TFLOP/s by shape and format."""
    figures = measured_rates(entries)
    yield "## Matrix products and attention"
    yield ""
    yield "`products/all`: `forward`, `inputs` and `weights` (gradients), tokens × columns × inner of the linear layer."
    yield ""
    yield from head("what, TFLOP/s, of the peak, ms, MHz, W, °C".split(", "))
    rates = dict(figures.get("rates", {}))
    for kernel, parts in figures.get("attention", {}).items():
        rates.update({f"attention {kernel} {part}": values for part, values in parts.items()})
    for name, values in rates.items():
        # Attention multiplies in bfloat16.
        form = next((word for word in ("float8_tensorwise", "float8_rowwise") if word in name), "bfloat16")
        peak = hardware.peak_flops(facts.device, "float8_e4m3fn" if form.startswith("float8") else "bfloat16")
        yield line(
            name,
            number(values["tflops"], "{:.4g}"),
            NONE if peak is None else number(values["tflops"], "{:.1f} %", peak / 100e12),
            number(values["seconds"], "{:.4g}", 1e-3),
            number(values.get("mhz"), "{:.0f}"),
            number(values.get("watts"), "{:.0f}"),
            number(values.get("celsius"), "{:.0f}"),
        )
    for name, values in figures.get("memory", {}).items():
        speed = number(values["bytes_per_second"], "{:.4g} TB/s", 1e12)
        yield line(name, speed, NONE, number(values["seconds"], "{:.4g}", 1e-3), *[NONE] * 3)
    for name, reason in figures.get("failed", {}).items():
        yield line(name, plain(reason), *[NONE] * 5)


def _kernels(order: Sequence[Row], entries: Entries) -> Iterator[str]:
    """The kernels of a step."""
    yield "## Kernels of a step"
    for row in order:
        kernels = entries.get(row.name, {}).get("figures", {}).get("kernels")
        if row.piece != "kernels" or kernels is None:
            continue
        yield ""
        yield f"`{row.name}`: {number(kernels['seconds'], '{:.4g}')} s in all"
        yield ""
        yield from head(["kernel", "ms", "share", "calls"])
        for name, values in kernels["most"].items():
            share = number(values["seconds"], "{:.1f} %", kernels["seconds"] / 100) if kernels["seconds"] else NONE
            milliseconds = number(values["seconds"], "{:.3f}", 1e-3)
            yield line(f"`{plain(name)[:90]}`", milliseconds, share, str(values["calls"]))


def _missing(order: Sequence[Row], entries: Entries) -> Iterator[str]:
    """Rows without figures, or with a part of them, and why."""
    yield "## Rows that were not measured whole"
    yield ""
    lines = []
    for row in order:
        entry = entries.get(row.name)
        if entry is None:
            lines.append(line(row.name, "not run", NONE))
        elif entry["status"] != MEASURED:
            lines.append(line(row.name, entry["status"], plain(entry.get("reason", "not entry"))))
    if not lines:
        yield "None."
        return
    yield from head(["row", "", "why"])
    yield from lines


def _without_gaps(lines: Sequence[str]) -> list[str]:
    """The lines without a second empty one after another."""
    return [text for place, text in enumerate(lines) if text or place == 0 or lines[place - 1]]

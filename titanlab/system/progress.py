"""Formats a run's progress as one line: a bar with numbers for a terminal, words and numbers for a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.system.text import duration, grouped, rate, short, short_span, significant

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12
_BAR_WIDTHS = (8, 32)
_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The numbers of a step, or of the steps since the last log line; a number that is None is not shown."""

    step: int  # number of optimizer steps done
    steps: int  # number of optimizer steps in all
    # The next three numbers are those of the last step.
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None  # speed of one device
    devices: int = 1  # number of devices; if there are several, the line shows the speed as tok/s/device
    mfu_percent: float | None = None  # model FLOPs utilisation
    step_seconds: float | None = None  # duration of one step
    data_seconds: float | None = None  # the part of `step_seconds` spent waiting for data
    memory_gib: float | None = None  # peak memory of one device, or resident memory on CPU
    seconds_left: float | None = None  # estimated time for the rest of the run
    warming_up: bool = False  # whether the speeds include warm-up steps


@dataclass(frozen=True)
class Style:
    """Escape sequences for the colours of a terminal; all are empty if there are no colours."""

    done: str = ""
    rest: str = ""
    strong: str = ""
    faint: str = ""
    off: str = ""


PLAIN = Style()
COLOURS = Style(done="\x1b[36m", rest="\x1b[2m", strong="\x1b[1m", faint="\x1b[2m", off="\x1b[0m")


def plain_line(progress: Progress) -> str:
    """One line of a log, each number with its unit."""
    parts = [part.text for part in _figures(progress, PLAIN, times=True)]
    return _GAP.join(["step " + parts[0], *parts[1:], *(["(warm-up)"] if progress.warming_up else [])])


def live_line(
    progress: Progress, losses: Sequence[float], *, columns: int, style: Style = PLAIN, unicode: bool = True
) -> str:
    """One line of a terminal, shorter than `columns`.

    On a narrow terminal the line loses the bar and the curve, then digits, and at last the less important numbers.

    Args:
        losses: one for each of the last log lines, drawn as a small curve.
        unicode: whether the terminal can show line and block characters.
    """
    p, room = progress, columns - 1
    parts = _figures(p, style)
    if p.warming_up:
        parts.append(_LinePart("warming up", _DECORATION, style.faint, style.off))
    if unicode and len(losses) > 1:
        parts.insert(2 if p.loss is not None else 1, _LinePart(sparkline(losses), _DECORATION, style.done, style.off))
    narrowest, widest = _BAR_WIDTHS
    while _width(parts, _GAP) > room - narrowest - len(_GAP) and any(part.rank == _DECORATION for part in parts):
        parts.remove(max(parts, key=lambda part: part.rank))
    width = min(widest, room - _width(parts, _GAP) - len(_GAP))
    if width >= narrowest:
        return bar(p.step, p.steps, width, style=style, unicode=unicode) + _GAP + _joined(parts, _GAP)
    return _fitting(p, room, style)


def kept_line(progress: Progress, *, columns: int) -> str:
    """The line of a log, if the line is shorter than `columns`; otherwise its most important numbers, shortened."""
    line = plain_line(progress)
    return line if len(line) < columns else _fitting(progress, columns - 1, PLAIN)


@dataclass(frozen=True)
class _LinePart:
    """A part of the line. If the line is too long, the part with the highest `rank` is dropped first."""

    text: str
    rank: int
    on: str = ""
    off: str = ""


_DECORATION = 9


def _figures(p: Progress, style: Style, *, in_short: bool = False, times: bool = False) -> list[_LinePart]:
    """The numbers as parts of the line, in order.

    Args:
        in_short: whether the numbers have few digits and short units.
        times: whether to add the time of a step, and the part of it spent waiting for data.
    """
    parts = [_LinePart(f"{p.step:>{len(str(p.steps))}}/{p.steps}", 0)]
    if p.loss is not None:
        loss = significant(p.loss, 4) if in_short else loss_text(p.loss)
        parts.append(_LinePart(f"loss {loss}", 1, style.strong, style.off))
    if p.grad_norm is not None:
        parts.append(_LinePart(f"grad {significant(p.grad_norm, 3 if in_short else 4)}", 5))
    if p.learning_rate is not None:
        # Remove the zero that pads the exponent.
        brief = f"{p.learning_rate:.0e}".replace("e-0", "e-").replace("e+00", "")
        parts.append(_LinePart(f"lr {brief if in_short else rate(p.learning_rate)}", 6))
    if p.tokens_per_second is not None:
        whole = f"{grouped(p.tokens_per_second)} tok/s{'/device' if p.devices > 1 else ''}"
        parts.append(_LinePart(f"{short(p.tokens_per_second)} tok/s" if in_short else whole, 3))
    if p.mfu_percent is not None:
        parts.append(_LinePart(f"MFU {p.mfu_percent:.{0 if in_short else 1}f}%", 4))
    if p.step_seconds is not None and times:
        parts.append(_LinePart(f"{short_span(p.step_seconds)}/step", 8))
        if p.data_seconds is not None and p.step_seconds > 0:
            parts.append(_LinePart(f"data {100 * p.data_seconds / p.step_seconds:.1f}%", 8))
    if p.memory_gib is not None:
        parts.append(_LinePart(f"{significant(p.memory_gib)}G" if in_short else f"{p.memory_gib:.2f} GiB", 7))
    if p.seconds_left is not None:
        text = duration(p.seconds_left) + ("" if in_short else " left")
        parts.append(_LinePart(text, 2, style.faint, style.off))
    return parts


def _fitting(p: Progress, room: int, style: Style) -> str:
    """The numbers that fit into `room`: all in full, else all shortened, else the most important ones shortened."""
    for in_short, gap in ((False, _GAP), (True, _GAP), (True, " ")):
        parts = _figures(p, style, in_short=in_short)
        if _width(parts, gap) <= room:
            mark = [_LinePart("(warm-up)", _DECORATION, style.faint, style.off)] if p.warming_up else []
            return _joined([*parts, *mark] if _width([*parts, *mark], gap) <= room else parts, gap)
    while len(parts) > 1 and _width(parts, " ") > room:
        parts.remove(max(parts, key=lambda part: part.rank))
    return _joined(parts, " ") if _width(parts, " ") <= room else ""


def bar(step: int, steps: int, width: int, *, style: Style = PLAIN, unicode: bool = True) -> str:
    """A bar of `width` characters; with Unicode it grows by half characters."""
    share = min(1.0, max(0.0, step / steps)) if steps > 0 else 0.0
    if not unicode:
        full = int(share * width)
        return "[" + ("=" * full)[: width - 2].ljust(width - 2, ".") + "]"
    halves = int(share * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    # If there are no colours, another character marks the rest of the bar.
    rest = ("━" if style.rest else "┄") * (width - len(done))
    return f"{style.done}{done}{style.off}{style.rest}{rest}{style.off}"


def sparkline(values: Sequence[float]) -> str:
    """The last values as block characters (▁ lowest, █ highest); a space for a value that is not finite."""
    shown = list(values)[-_SPARK_WIDTH:]
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return " " * len(shown)
    low, span = min(known), max(known) - min(known)
    top = len(_BLOCKS) - 1
    # Equal values get the lowest block. `0.0 * value` keeps NaN, and turns infinity into NaN.
    shares = [(value - low) / span if 0 < span < math.inf else 0.0 * value for value in shown]
    return "".join(_BLOCKS[round(top * share)] if math.isfinite(share) else " " for share in shares)


def loss_text(loss: float) -> str:
    """A loss with four decimal places; `nan` or `inf` if it is not finite."""
    return f"{loss:.4f}" if math.isfinite(loss) else str(loss)


def _width(parts: Sequence[_LinePart], gap: str) -> int:
    return sum(len(part.text) for part in parts) + len(gap) * (len(parts) - 1)


def _joined(parts: Sequence[_LinePart], gap: str) -> str:
    return gap.join(f"{part.on}{part.text}{part.off}" for part in parts)

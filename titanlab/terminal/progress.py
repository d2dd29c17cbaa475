"""Formats a run's progress as one line: a bar with numbers for a terminal, words and numbers for a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.terminal.numerals import duration, grouped, rate, short_span, significant

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12
_BAR_WIDTHS = (8, 32)
_BAR_PLACE = 3
_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Numbers of a step, or of the steps since the last log line; None is not shown.

    Attributes:
        step, steps: optimizer steps done, and in all.
        loss, grad_norm, learning_rate: of the last step.
        tokens_per_second: of one device.
        devices: number of devices; if there are several, the line shows the speed as tok/s/device.
        mfu_percent: model FLOPs utilisation.
        step_seconds, data_seconds: time of one step, and the part of it spent waiting for data.
        memory_gib: peak of one device, or resident memory on CPU.
        seconds_left: estimate for the rest of the run.
        warming_up: whether the speeds include warm-up steps.
    """

    step: int
    steps: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    devices: int = 1
    mfu_percent: float | None = None
    step_seconds: float | None = None
    data_seconds: float | None = None
    memory_gib: float | None = None
    seconds_left: float | None = None
    warming_up: bool = False


@dataclass(frozen=True)
class Style:
    """Escape sequences for colours of a terminal; all empty for no colours."""

    done: str = ""
    rest: str = ""
    strong: str = ""
    faint: str = ""
    off: str = ""


PLAIN = Style()
COLOURS = Style(done="\x1b[36m", rest="\x1b[2m", strong="\x1b[1m", faint="\x1b[2m", off="\x1b[0m")


def plain_line(progress: Progress) -> str:
    """One line of a log, each number with its unit."""
    p = progress
    parts = [_steps(p)]
    if p.loss is not None:
        parts.append(f"loss {loss_text(p.loss)}")
    if p.grad_norm is not None:
        parts.append(f"grad {significant(p.grad_norm, 4)}")
    if p.learning_rate is not None:
        parts.append(f"lr {rate(p.learning_rate)}")
    if p.tokens_per_second is not None:
        parts.append(_speed(p))
    if p.mfu_percent is not None:
        parts.append(f"MFU {p.mfu_percent:.1f}%")
    if p.step_seconds is not None:
        parts.append(f"{short_span(p.step_seconds)}/step")
        if p.data_seconds is not None and p.step_seconds > 0:
            parts.append(f"data {100 * p.data_seconds / p.step_seconds:.1f}%")
    if p.memory_gib is not None:
        parts.append(f"{p.memory_gib:.2f} GiB")
    if p.seconds_left is not None:
        parts.append(f"{duration(p.seconds_left)} left")
    if p.warming_up:
        parts.append("(warm-up)")
    return _GAP.join(parts)


def live_line(
    progress: Progress, losses: Sequence[float], *, columns: int, style: Style = PLAIN, unicode: bool = True
) -> str:
    """One line of a terminal, shorter than `columns`; if it is too long, the least important numbers are left out.

    Args:
        losses: of the last log windows, drawn as a small curve.
        unicode: whether the terminal can show line and block characters.
    """
    p = progress
    # (priority, text) in the order of the line; the part with the highest number is dropped first
    parts: list[tuple[int, str]] = [(0, f"{p.step:>{len(str(p.steps))}}/{p.steps}")]
    if p.loss is not None:
        parts.append((1, f"{style.strong}loss {loss_text(p.loss)}{style.off}"))
    if unicode and len(losses) > 1:
        parts.append((5, f"{style.done}{sparkline(losses)}{style.off}"))
    if p.tokens_per_second is not None:
        parts.append((3, _speed(p)))
    if p.mfu_percent is not None:
        parts.append((4, f"MFU {p.mfu_percent:.1f}%"))
    if p.seconds_left is not None:
        parts.append((2, f"{style.faint}{duration(p.seconds_left)} left{style.off}"))
    if p.warming_up:
        parts.append((6, f"{style.faint}warming up{style.off}"))
    room = columns - 1
    narrowest, widest = _BAR_WIDTHS
    # In a narrow terminal, parts of a priority number above _BAR_PLACE are dropped before the bar, others after it.
    for allowed, most in ((room - narrowest - len(_GAP), _BAR_PLACE), (room, 0)):
        while (least := max(parts, key=lambda part: part[0]))[0] > most and _width(parts, style) > allowed:
            parts.remove(least)
    figures = _GAP.join(text for _, text in parts)
    width = min(widest, room - _width(parts, style) - len(_GAP))
    if width < narrowest:
        return figures if _width(parts, style) <= room else ""
    return bar(p.step, p.steps, width, style=style, unicode=unicode) + _GAP + figures


def bar(step: int, steps: int, width: int, *, style: Style = PLAIN, unicode: bool = True) -> str:
    """A bar of `width` characters; with Unicode it grows by half characters."""
    share = min(1.0, max(0.0, step / steps)) if steps > 0 else 0.0
    if not unicode:
        full = int(share * width)
        return "[" + ("=" * full)[: width - 2].ljust(width - 2, ".") + "]"
    halves = int(share * width * 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    # Without colours, another character marks the rest of the bar.
    rest = ("━" if style.rest else "┄") * (width - len(done))
    return f"{style.done}{done}{style.off}{style.rest}{rest}{style.off}"


def sparkline(values: Sequence[float]) -> str:
    """The last values as blocks, scaled from the lowest to the highest; a space for a value that is not finite."""
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


def _steps(progress: Progress) -> str:
    return f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def _speed(progress: Progress) -> str:
    unit = "tok/s" if progress.devices == 1 else "tok/s/device"
    return f"{grouped(progress.tokens_per_second or 0.0)} {unit}"


def _width(parts: Sequence[tuple[int, str]], style: Style) -> int:
    text = _GAP.join(text for _, text in parts)
    for code in (style.done, style.rest, style.strong, style.faint, style.off):
        text = text.replace(code, "") if code else text
    return len(text)

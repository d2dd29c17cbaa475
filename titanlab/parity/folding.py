"""Folding: layouts of few processes that together exercise every axis of a large one. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping

from titanlab.costs.layout import AXES, SHORT, Layout
from titanlab.errors import ConfigError

MOST_PROCESSES = 16
# The degree to which a larger one is folded: an axis works with two ranks as with many.
FOLDED = 2
# Pipelines and tensor parallelism come first: most of what can go wrong needs them, alone or with another axis.
_ORDER = ("pipeline", "tensor", "context", "shard", "replicate")


def folded(layout: Layout, *, most: int = MOST_PROCESSES, fixed: Mapping[str, str] | None = None) -> list[Layout]:
    """The layout itself if it has at most `most` processes; else layouts with degrees of 2.

    Every axis of the layout has a degree of at least 2 in at least one of them. The first one has as many axes as
    fit together, the later ones have those that did not fit, and others beside them.

    Args:
        most: processes of one layout.
        fixed: axes whose degree cannot be changed, each with the reason.

    Raises:
        ConfigError: an axis whose degree cannot be changed has more ranks than that.
    """
    if layout.world <= most:
        return [layout]
    fixed = fixed or {}
    degrees = layout.degrees()
    least = {
        axis: degrees[axis] if axis in fixed else min(degrees[axis], FOLDED) for axis in _ORDER if degrees[axis] > 1
    }
    for axis, degree in least.items():
        if degree > most:
            why = fixed.get(axis, f"at most {most} processes are started")
            raise ConfigError(
                f"parallelism.{axis}", degree, f"cannot be folded to {most} processes: {why}", "allow more: --processes"
            )
    missing = list(least)
    layouts = []
    while missing:
        chosen: dict[str, int] = {}
        for axis in (*missing, *(axis for axis in least if axis not in missing)):
            if math.prod(chosen.values()) * least[axis] <= most:
                chosen[axis] = least[axis]
        missing = [axis for axis in missing if axis not in chosen]
        layouts.append(Layout(**{axis: chosen.get(axis, 1) for axis in AXES}))
    return layouts


def fold_label(layout: Layout, real: Layout) -> str:
    """Both layouts as text: `dp_s2·tp2 of dp_s64·tp8`; one if they are the same."""
    return layout.label if layout == real else f"{layout.label} of {real.label}"


def missing_axes(layout: Layout, real: Layout) -> list[str]:
    """Short names of the axes that a layout lacks."""
    return [SHORT[axis] for axis, degree in real.degrees().items() if degree > 1 and getattr(layout, axis) == 1]

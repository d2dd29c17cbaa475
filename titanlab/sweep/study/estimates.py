"""Estimates of a study's runs, and the study without runs that do not fit into memory."""

from __future__ import annotations

import dataclasses

from titanlab.errors import ConfigError
from titanlab.plan.explanation import MEMORY_ERROR, Estimate, estimate_of
from titanlab.sweep.study.plan import Dropped, Planned, Study
from titanlab.terminal.numerals import counted

STAGE = "memory"


def fitting(study: Study, *, strictly: bool) -> Study:
    """The study without the runs that do not fit into memory, with a notice on those that may not.

    Args:
        strictly: leave out all whose estimate exceeds a device's memory; else only those whose estimate exceeds it by
            more than the error of estimates.

    Raises:
        ConfigError: none is left.
    """
    kept: list[Planned] = []
    dropped = list(study.dropped)
    doubtful = 0
    for planned in study.planned:
        estimate = estimate_of(planned.recipe)
        if estimate is None or estimate.fits or not (strictly or estimate.cannot_fit):
            kept.append(planned)
            doubtful += estimate is not None and not estimate.fits
        else:
            dropped.append(Dropped(point=planned.point, stage=STAGE, reason=_reason(estimate)))
    if not kept:
        rule = f"none of {len(study.planned)} runs fits into memory; {dropped[-1].reason}"
        cure = "see what fits: titanlab plan; or submit them all the same: --keep"
        raise ConfigError("arguments", study.name, rule, cure)
    notices = []
    percent = f"{100 * MEMORY_ERROR:.0f} %"
    if doubtful:
        notices.append(
            f"{counted(doubtful, 'run')} may not fit into memory: each estimate is too much, but by less than the "
            f"largest error of estimates ({percent}); --prune leaves them out"
        )
    left_out = len(study.planned) - len(kept)
    if left_out and not strictly:
        notices.append(
            f"{counted(left_out, 'run')} left out: their estimates exceed a device's memory by more than {percent}, "
            "the largest error of estimates; --keep keeps all"
        )
    return dataclasses.replace(study, planned=tuple(kept), dropped=tuple(dropped), notices=(*study.notices, *notices))


def _reason(estimate: Estimate) -> str:
    assert estimate.limit_bytes is not None
    return (
        f"would reserve about {estimate.reserved_bytes / 1e9:.0f} GB of a device's {estimate.limit_bytes / 1e9:.1f} GB"
    )

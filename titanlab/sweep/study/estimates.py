"""Estimates of a study's runs, and the study without runs that do not fit into memory."""

from __future__ import annotations

import dataclasses

from titanlab.errors import ConfigError
from titanlab.planner.estimate import Estimate, estimate_of
from titanlab.sweep.study.plan import Dropped, Planned, Study

STAGE = "memory"


def fitting(study: Study) -> Study:
    """The study without the runs of which an estimate says that they do not fit.

    Raises:
        ConfigError: none is left.
    """
    kept: list[Planned] = []
    dropped = list(study.dropped)
    for planned in study.planned:
        estimate = estimate_of(planned.recipe)
        if estimate is None or estimate.fits:
            kept.append(planned)
        else:
            dropped.append(Dropped(point=planned.point, stage=STAGE, reason=_reason(estimate)))
    if not kept:
        rule = f"none of {len(study.planned)} runs fits into memory; {dropped[-1].reason}"
        raise ConfigError("--prune", "true", rule, "leave it out, or see what fits: titanlab plan")
    return dataclasses.replace(study, planned=tuple(kept), dropped=tuple(dropped))


def _reason(estimate: Estimate) -> str:
    assert estimate.limit_bytes is not None
    return (
        f"would reserve about {estimate.reserved_bytes / 1e9:.0f} GB of a device's {estimate.limit_bytes / 1e9:.1f} GB"
    )

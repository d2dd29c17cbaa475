"""How far the losses of runs are from those of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlab.costs import meter
from titanlab.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame

LOSS, GRAD_NORM = "loss_difference", "grad_norm_difference"
COLUMNS = ("run", "name", "layout.label", "step", "tokens", LOSS, GRAD_NORM)


def differences_frame(steps: DataFrame, reference: str) -> DataFrame:
    """Relative differences of losses and gradient norms from those of a reference, step by step.

    |x − reference| / |reference|, for the steps at which both runs have logged a row after the same number of tokens.
    Two layouts of one recipe differ by the rounding of sums in another order: by less than 1e-5 in fp32.

    Args:
        steps: the frame of `titanlab.report.frames.metrics_frame`.
        reference: folder name of the run that the others are compared with.

    Returns:
        Columns: `run`, `name`, `layout.label`, `step`, `tokens`, `loss_difference`, `grad_norm_difference` (a share:
        0.01 is 1 %; empty where a value is missing or not finite). The reference itself has no rows.

    Raises:
        ConfigError: the frame has no such run.
    """
    own = steps[steps["run"] == reference]
    if own.empty:
        known = ", ".join(dict.fromkeys(steps["run"].astype(str))) or "no run has logged a step"
        raise ConfigError("reference", reference, "is no run of these steps", f"known: {known}")
    keys = ["step", meter.TOKENS_SEEN]
    names = [name for name in (meter.LOSS, meter.GRAD_NORM) if name in steps]
    others = steps[steps["run"] != reference]
    joined = others.merge(own[[*keys, *names]], on=keys, suffixes=("", " of reference"))
    joined = joined.rename(columns={meter.TOKENS_SEEN: "tokens"})
    for name, column in ((meter.LOSS, LOSS), (meter.GRAD_NORM, GRAD_NORM)):
        if name in names:
            joined[column] = _relative(joined[name], joined[f"{name} of reference"])
        else:
            joined[column] = float("nan")
    frame: DataFrame = joined[list(COLUMNS)].reset_index(drop=True)
    return frame


def largest_differences(differences: DataFrame) -> DataFrame:
    """One row for each run: its largest differences over all steps, and how many steps were compared.

    Args:
        differences: the frame of `differences_frame`.

    Returns:
        Columns: `run`, `name`, `layout.label`, `steps`, `loss_difference`, `grad_norm_difference`.
    """
    named = differences.groupby(["run", "name", "layout.label"], sort=False)
    frame: DataFrame = named.agg(steps=("step", "count"), **{name: (name, "max") for name in (LOSS, GRAD_NORM)})
    return frame.reset_index()


def _relative(values: DataFrame, reference: DataFrame) -> DataFrame:
    import numpy as np

    values, reference = values.astype(float), reference.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = (values - reference).abs() / reference.abs()
    # Equal values differ by nothing, also where both are 0.
    difference = difference.where(values != reference, 0.0)
    return difference.where(np.isfinite(difference))

"""Calibration: the efficiencies of a cluster, fitted to runs that were measured on it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlab.costs.layout import AXES
from titanlab.errors import ConfigError
from titanlab.planner.efficiencies import LIMITS, Efficiencies, allocator_excess, changed, fitted
from titanlab.planner.least_squares import fit
from titanlab.planner.machine import Machine, machine_of
from titanlab.planner.memory import most_memory
from titanlab.planner.step_time import step_time
from titanlab.planner.timing.pipeline_time import simulated_time
from titanlab.recipe.recipe import Recipe

KEY = "--calibrate"
# Fewer runs than this say too little of so many parameters.
LEAST_RUNS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured run.

    Attributes:
        name: for messages.
        recipe: resolved.
        step_seconds: median of its steps.
        memory_bytes: largest memory of a rank; None: not measured.
    """

    name: str
    recipe: Recipe
    step_seconds: float
    memory_bytes: float | None = None

    @property
    def family(self) -> str:
        """The axes along which the layout is parallel: `shard·tensor`, or `one process`."""
        degrees = self.recipe.layout.degrees()
        return "·".join(axis for axis in AXES if degrees[axis] > 1) or "one process"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Median absolute errors of some runs, as shares of what was measured; nan without a measured run.

    Attributes:
        runs: their number.
        time, memory: errors.
    """

    runs: int
    time: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        efficiencies: the fitted ones.
        excess: reserved or resident bytes for each estimated byte.
        before, after: errors by family, with those of all runs under `all`.
    """

    efficiencies: Efficiencies
    excess: float
    before: Mapping[str, Errors]
    after: Mapping[str, Errors]


def calibrate(runs: Sequence[Measured]) -> Calibration:
    """Fit the efficiencies to measured runs, from those of their cluster on.

    Raises:
        ConfigError: there are too few runs, a measured time is no positive number, or the runs have several clusters.
    """
    _check(runs)
    start = changed(fitted(), runs[0].recipe.cluster.efficiencies)

    def errors(values: Efficiencies) -> list[float]:
        return time_errors(runs, values)

    found = fit(errors, start, list(LIMITS))
    ratios = [run.memory_bytes / most_memory(run.recipe).allocated for run in runs if run.memory_bytes is not None]
    excess = statistics.median(ratios) if ratios else allocator_excess()
    return Calibration(
        efficiencies=found,
        excess=excess,
        before=by_family(runs, start, allocator_excess()),
        after=by_family(runs, found, excess),
    )


def time_errors(runs: Sequence[Measured], values: Efficiencies) -> list[float]:
    """Logarithm of estimated over measured step time, by run."""
    machines: dict[str, Machine] = {}
    found = []
    for run in runs:
        key = f"{run.recipe.cluster}"
        if key not in machines:
            machines[key] = dataclasses.replace(machine_of(run.recipe), efficiencies=values)
        seconds = step_time(run.recipe, machines[key], pipeline=simulated_time).seconds
        found.append(math.log(seconds / run.step_seconds))
    return found


def by_family(runs: Sequence[Measured], values: Efficiencies, excess: float) -> dict[str, Errors]:
    """Errors of estimates, by family."""
    times = [abs(math.expm1(error)) for error in time_errors(runs, values)]
    memories = [
        abs(most_memory(run.recipe).allocated * excess / run.memory_bytes - 1)
        if run.memory_bytes is not None
        else math.nan
        for run in runs
    ]
    found = {}
    for family in ("all", *sorted({run.family for run in runs})):
        own = [place for place, run in enumerate(runs) if family in ("all", run.family)]
        known = [memories[place] for place in own if not math.isnan(memories[place])]
        found[family] = Errors(
            runs=len(own),
            time=statistics.median(times[place] for place in own),
            memory=statistics.median(known) if known else math.nan,
        )
    return found


def lines(calibration: Calibration) -> list[str]:
    """The result as text: a table of errors, and the values."""
    heading = f"{'layouts':24} {'runs':>4}  {'time':>7} {'after':>7}  {'memory':>7} {'after':>7}"
    rows = [heading]
    for family, after in calibration.after.items():
        before = calibration.before[family]
        figures = [_percent(value) for value in (before.time, after.time, before.memory, after.memory)]
        rows.append(f"{family:24} {after.runs:4}  {figures[0]:>7} {figures[1]:>7}  {figures[2]:>7} {figures[3]:>7}")
    rows.append("")
    rows += [f"{name} {value:.4g}" for name, value in dataclasses.asdict(calibration.efficiencies).items()]
    rows.append(f"memory of the process for each byte of tensors {calibration.excess:.4g}")
    return rows


def cluster_file(recipe: Recipe, calibration: Calibration) -> str:
    """Content of a file of the group `cluster`: that of the runs, with the fitted efficiencies."""
    cluster = dataclasses.asdict(recipe.cluster)
    text = ["defaults: [schema, _self_]", f"# Calibrated with {calibration.after['all'].runs} runs."]
    text += [f"{key}: {value}" for key, value in cluster.items() if key != "efficiencies" and value is not None]
    text.append("efficiencies:")
    text += [f"  {name}: {value:.6g}" for name, value in dataclasses.asdict(calibration.efficiencies).items()]
    return "\n".join(text) + "\n"


def _check(runs: Sequence[Measured]) -> None:
    if len(runs) < LEAST_RUNS:
        rule = f"a calibration needs at least {LEAST_RUNS} measured runs"
        raise ConfigError(KEY, f"{len(runs)} runs", rule, "submit a sweep with more points")
    for run in runs:
        if not 0 < run.step_seconds < math.inf:
            raise ConfigError(KEY, run.step_seconds, f"is no time of a step of {run.name}", "leave the run out")
        if run.memory_bytes is not None and not 0 < run.memory_bytes < math.inf:
            raise ConfigError(KEY, run.memory_bytes, f"is no memory of {run.name}", "leave the run out")
    clusters = {repr(run.recipe.cluster): run for run in runs}
    if len(clusters) > 1:
        first, second = list(clusters.values())[:2]
        rule = f"{first.name} and {second.name} have different clusters, and a calibration is of one"
        raise ConfigError(KEY, f"{len(clusters)} clusters", rule, "choose the runs of one cluster")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"

"""Calibration: the efficiencies of a cluster, fitted to measured runs by robust least squares."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlab.costs import AXES
from titanlab.errors import ConfigError
from titanlab.plan.machine import LIMITS, Efficiencies, Machine, machine_of
from titanlab.plan.memory import exchanged_bytes, most_memory, reserved_bytes
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time
from titanlab.ranges import plain
from titanlab.recipe import Cluster, Recipe, literal
from titanlab.records import config_text

KEY = "--calibrate"
# Rates of CPUs are fitted from this multiple downwards: no efficiency is above 1, and caches are faster than memory.
_WIDER = 5.0
# Values of a cluster are positive.
_LEAST = 1e-3
# Fewer runs than this say too little of so many parameters.
LEAST_RUNS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured run: median of its steps, and the largest memory of a rank (None: not measured)."""

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
    """Median absolute errors of a number of runs, as shares of what was measured; nan without a measured run."""

    runs: int
    time: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The cluster of the runs with the fitted values, and errors by family, with those of all runs under `all`."""

    cluster: Cluster
    before: Mapping[str, Errors]
    after: Mapping[str, Errors]


def calibrate(runs: Sequence[Measured]) -> Calibration:
    """Fit the cluster of measured runs to them, from its own values on.

    Raises:
        ConfigError: there are too few runs, a measured time is no positive number, or the runs have several clusters.
    """
    _check(runs)
    original = runs[0].recipe.cluster
    calibrated = _with_times(runs, _widened(runs, original) if original.accelerator == "cpu" else original)
    calibrated = _with_memory(runs, calibrated)
    return Calibration(cluster=calibrated, before=by_family(runs, original), after=by_family(runs, calibrated))


def time_errors(runs: Sequence[Measured], cluster: Cluster) -> list[float]:
    """Logarithm of estimated over measured step time on a cluster, by run."""
    return _errors(runs, _machine(runs, cluster)) if runs else []


def memory_errors(runs: Sequence[Measured], cluster: Cluster) -> list[float]:
    """Error of the estimated memory on a cluster as a share of the measured one, by run; nan: none was measured."""
    if not runs:
        return []
    machine = _machine(runs, cluster)
    return [
        reserved_bytes(run.recipe, machine, most_memory(run.recipe)) / run.memory_bytes - 1
        if run.memory_bytes is not None
        else math.nan
        for run in runs
    ]


def by_family(runs: Sequence[Measured], cluster: Cluster) -> dict[str, Errors]:
    """Errors of estimates on a cluster, by family."""
    times = [abs(math.expm1(error)) for error in time_errors(runs, cluster)]
    memories = [abs(error) for error in memory_errors(runs, cluster)]
    errors = {}
    for family in ("all", *sorted({run.family for run in runs})):
        own = [place for place, run in enumerate(runs) if family in ("all", run.family)]
        known = [memories[place] for place in own if not math.isnan(memories[place])]
        errors[family] = Errors(
            runs=len(own),
            time=statistics.median(times[place] for place in own),
            memory=statistics.median(known) if known else math.nan,
        )
    return errors


def _machine(runs: Sequence[Measured], cluster: Cluster) -> Machine:
    return machine_of(dataclasses.replace(runs[0].recipe, cluster=cluster))


def _errors(runs: Sequence[Measured], machine: Machine) -> list[float]:
    return [
        math.log(step_time(run.recipe, machine, pipeline=simulated_time).seconds / run.step_seconds) for run in runs
    ]


def _with_times(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """The cluster with efficiencies that fit the times of its runs."""
    machine = _machine(runs, cluster)

    def errors(values: Efficiencies) -> list[float]:
        return _errors(runs, dataclasses.replace(machine, efficiencies=values))

    values = dataclasses.asdict(fit(errors, machine.efficiencies, list(LIMITS)))
    fitted = dataclasses.replace(cluster, efficiencies=values)
    return _narrowed(fitted) if cluster.accelerator == "cpu" else fitted


def _widened(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """A cluster of CPUs with larger rates, and efficiencies that are smaller by as much."""
    machine = _machine(runs, cluster)
    shares = dataclasses.asdict(machine.efficiencies)
    narrow = {name: max(LIMITS[name][0], shares[name] / _WIDER) for name in ("eager_memory", "fused_memory", "link")}
    return dataclasses.replace(
        cluster,
        memory_gb_per_second=_WIDER * machine.memory_bytes_per_second / 1e9,
        link_gb_per_second=_WIDER * machine.link_bytes_per_second / 1e9,
        efficiencies=shares | narrow,
    )


def _narrowed(cluster: Cluster) -> Cluster:
    """The cluster with the rates that were reached; efficiencies are shares of these."""
    assert cluster.memory_gb_per_second is not None
    assert cluster.link_gb_per_second is not None
    shares = cluster.efficiencies
    memory = max(shares["eager_memory"], shares["fused_memory"])
    return dataclasses.replace(
        cluster,
        memory_gb_per_second=cluster.memory_gb_per_second * memory,
        link_gb_per_second=cluster.link_gb_per_second * shares["link"],
        efficiencies={
            **shares,
            "eager_memory": shares["eager_memory"] / memory,
            "fused_memory": shares["fused_memory"] / memory,
            "link": 1.0,
        },
    )


def _with_memory(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """The cluster with the allocator's excess of its runs; on CPUs also with that of a process and of messages."""
    known = [(run.recipe, most_memory(run.recipe), run.memory_bytes) for run in runs if run.memory_bytes is not None]
    if not known:
        return cluster
    measured = [own for _, _, own in known]
    allocated = [float(memory.allocated) for _, memory, _ in known]
    if cluster.accelerator != "cpu":
        ratios = [own / estimated for own, estimated in zip(measured, allocated, strict=True)]
        return dataclasses.replace(cluster, allocator_excess=statistics.median(ratios))
    machine = _machine(runs, cluster)
    terms = [[1.0] * len(known), allocated, [exchanged_bytes(recipe, memory.rank) for recipe, memory, _ in known]]
    start = (machine.process_bytes, machine.allocator_excess, machine.message_excess)
    process, excess, messages = fit_sum(terms, measured, start)
    return dataclasses.replace(
        cluster,
        process_gb=max(process / 1e9, _LEAST),
        allocator_excess=max(excess, _LEAST),
        message_excess=messages or None,
    )


def calibration_lines(calibration: Calibration) -> list[str]:
    """The result as text: a table of errors, and the values."""
    heading = f"{'layouts':24} {'runs':>4}  {'time':>7} {'after':>7}  {'memory':>7} {'after':>7}"
    rows = [heading]
    for family, after in calibration.after.items():
        before = calibration.before[family]
        shares = (before.time, after.time, before.memory, after.memory)
        figures = ["-" if math.isnan(share) else f"{share:.1%}" for share in shares]
        rows.append(f"{family:24} {after.runs:4}  {figures[0]:>7} {figures[1]:>7}  {figures[2]:>7} {figures[3]:>7}")
    rows.append("")
    cluster = calibration.cluster
    names = ("memory_gb_per_second", "link_gb_per_second", "allocator_excess", "message_excess", "process_gb")
    known = {name: getattr(cluster, name) for name in names} | dict(cluster.efficiencies)
    rows += [f"{name:24} {value:.4g}" for name, value in known.items() if value is not None]
    return rows


def cluster_file(cluster: Cluster, comment: str) -> str:
    """Content of a file of the group `cluster`.

    Args:
        comment: one line, how the values were found.
    """
    values = {name: _rounded(value) for name, value in plain(cluster).items() if value not in (None, {})}
    return f"defaults: [schema, _self_]\n# {comment}\n{config_text(literal(values))}"


def _rounded(value: Any) -> Any:
    """Six digits: more are not known."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


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


# Errors beyond this one count by their size and not by their square (Huber 1964): a row that the model cannot explain
# does not decide the fit. 5 % of the time.
_HUBER = 0.05
# Weight of the distance from the start, in which a parameter that no row depends on stays. One unit of a parameter's
# coordinate (a factor of 2.7 for most) counts as an error of 2 % in one row.
_PRIOR = 0.02
# The same for the factors of a sum.
_HELD = 1e-3
_ITERATIONS = 40
_SMALL = 1e-4
# Their limits are many orders of magnitude apart: their coordinate is the logarithm.
_LOGARITHMIC = ("launch_seconds", "latency")
_FLOOR = 1e-8  # seconds; its logarithm exists


def fit(errors: Callable[[Efficiencies], Sequence[float]], start: Efficiencies, names: Sequence[str]) -> Efficiencies:
    """The efficiencies with the smallest errors, by least squares.

    Args:
        errors: logarithm of estimated over measured, for each run.
        start: first values, and those of all parameters that are not in `names`.
    """
    # Imported here: it takes 0.2 s.
    from scipy.optimize import least_squares

    origin = np.array([_coordinate(name, getattr(start, name)) for name in names])

    def residuals(at: np.ndarray) -> np.ndarray:
        raw = np.asarray(errors(_values(start, names, at)), dtype=float)
        # Pseudo-Huber: the square of this grows as the error beyond _HUBER.
        robust = np.sign(raw) * _HUBER * np.sqrt(2 * (np.sqrt(1 + (raw / _HUBER) ** 2) - 1))
        return np.concatenate([robust, _PRIOR * (at - origin)])

    return _values(start, names, least_squares(residuals, origin, ftol=_SMALL, max_nfev=_ITERATIONS).x)


def fit_sum(
    terms: Sequence[Sequence[float]], measured: Sequence[float], start: Sequence[float] | None = None
) -> list[float]:
    """Factors, none negative, of a sum of terms with the smallest sum of absolute relative errors.

    By least squares whose weights are repeatedly those that make each error count by its size.

    Args:
        terms: values of each term, by row.
        measured: positive, by row.
        start: factors that hold where the rows do not decide; None: zero.
    """
    from scipy.optimize import nnls

    y = np.asarray(measured, dtype=float)
    shares = np.asarray(terms, dtype=float).T / y[:, None]
    solution = np.zeros(len(terms)) if start is None else np.array(start, dtype=float)
    # Terms have different units: each is scaled by its largest share. One that no row has keeps its factor.
    scales = np.abs(shares).max(axis=0)
    used = scales > 0
    columns, origin = shares[:, used] / scales[used], solution[used] * scales[used]
    held, weights = _HELD * np.eye(columns.shape[1]), np.ones_like(y)
    for _ in range(_ITERATIONS if used.any() else 0):
        rows = np.concatenate([columns * weights[:, None], held])
        factors = nnls(rows, np.concatenate([weights, _HELD * origin]))[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ factors - 1), _SMALL))
        solution[used] = factors / scales[used]
    return [float(factor) for factor in solution]


def _values(start: Efficiencies, names: Sequence[str], point: np.ndarray) -> Efficiencies:
    return dataclasses.replace(
        start, **{name: _value(name, float(coordinate)) for name, coordinate in zip(names, point, strict=True)}
    )


def _coordinate(name: str, value: float) -> float:
    """A number without limits for a value inside its limits."""
    if name in _LOGARITHMIC:
        return math.log(max(value, _FLOOR))
    least, most = LIMITS[name]
    share = min(max((value - least) / (most - least), 1e-4), 1 - 1e-4)
    return math.log(share / (1 - share))


def _value(name: str, coordinate: float) -> float:
    least, most = LIMITS[name]
    if name in _LOGARITHMIC:
        return min(max(math.exp(min(coordinate, math.log(most))), least), most)
    share = 1 / (1 + math.exp(-max(min(coordinate, 50.0), -50.0)))
    return least + (most - least) * share

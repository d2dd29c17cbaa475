"""Fits a cluster's facts to measurements: of single operations (`--measure`), or of whole runs (`--calibrate`)."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from titanlab.costs import AXES
from titanlab.errors import ConfigError
from titanlab.plan.machine import HOST, LIMITS, AxisPlacement, Efficiencies, Machine, machine_of
from titanlab.plan.memory import exchanged_bytes, most_memory, reserved_bytes
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time
from titanlab.ranges import plain
from titanlab.recipe import Cluster, Recipe, literal
from titanlab.records import config_text
from titanlab.techniques.profiler import profilers_schema as names

KEY = "--measure"
_RUNS = "--calibrate"
# Group of ranks → the efficiency that the times of its collectives determine.
_LINKS = {names.NODE: "link", names.WORLD: "network"}
# Figure → how messages show it: divisor, unit, number of digits.
_UNITS: Mapping[str, tuple[float, str, int]] = {
    names.PRODUCT: (1e9, "GFLOP/s", 1),
    names.ATTENTION: (1e9, "GFLOP/s", 1),
    names.COPY: (1e9, "GB/s", 1),
    names.POINTWISE: (1e9, "GB/s", 1),
    names.CAST: (1e9, "GB/s", 1),
    names.LAUNCH: (1e-6, "µs", 2),
    names.HOST: (1e-6, "µs", 2),
    names.HOOK: (1e-6, "µs", 2),
    names.PROCESS: (1e9, "GB", 2),
}
# The largest collective must take longer than an empty collective by at least this share; less is noise.
_LEAST_GROWTH = 0.02
# This many of the smallest measured square products are ignored: a model's products are larger.
_SMALL_SQUARES = 2


class MeasuredCollective(NamedTuple):
    """One measured collective.

    Attributes:
        group: `node`, or `world` where the ranks are on several nodes.
        kind: `all_reduce`, `all_gather` or `all_to_all`.
        size: bytes of the whole tensor.
    """

    group: str
    ranks: int
    kind: str
    size: int
    seconds: float

    @property
    def trips(self) -> int:
        """How many times the collective sends its data around the ring."""
        return 2 if self.kind == "all_reduce" else 1


def measured_cluster(recipe: Recipe, row: Mapping[str, Any]) -> Cluster:
    """The cluster of a recipe, with the rates that `profiler=rates` has measured on it.

    Raises:
        ConfigError: a figure is missing or not positive.
    """
    figures, collectives = _figures(row)
    cluster = dataclasses.replace(recipe.cluster, efficiencies={})
    is_cpu = cluster.accelerator == "cpu"
    products = [rate for name, rate in figures.items() if name.startswith(names.PRODUCT)]
    # `best` is the rate of the fastest product; `typical` is the median of products as large as a model's.
    best, typical = max(products), statistics.median(products[_SMALL_SQUARES:] or products)
    memory = max(figures[names.COPY], figures[names.POINTWISE])
    measured = dataclasses.replace(cluster, peak_tflops=best / 1e12, memory_gb_per_second=memory / 1e9)
    try:
        cluster = measured if is_cpu and cluster.peak_tflops is None else cluster
        machine = machine_of(dataclasses.replace(recipe, cluster=cluster))
    except ConfigError:
        if cluster.peak_tflops is not None:
            raise
        # The device is in no table: take its facts from the measurement.
        cluster, machine = measured, machine_of(dataclasses.replace(recipe, cluster=measured))
    memory = max(memory, 0.0 if is_cpu else machine.memory_bytes_per_second)
    shares = {
        "product": typical / machine.product_rate("bfloat16"),
        # 1, because the attention rates of this cluster are measured themselves.
        "attention": 1.0,
        "eager_memory": figures[names.POINTWISE] / memory,
        "fused_memory": figures[names.COPY] / memory,
        "launch_seconds": figures[names.LAUNCH],
    }
    attention = {
        name.removeprefix(f"{names.ATTENTION} "): rate / 1e12
        for name, rate in figures.items()
        if name.startswith(names.ATTENTION)
    }
    cluster = dataclasses.replace(cluster, memory_gb_per_second=memory / 1e9, attention_tflops=attention)
    if not is_cpu:
        # A CPU is its own host: the rates of its operators include the time of the calls.
        measured_host = {"host_seconds": figures.get(names.HOST), "hook_seconds": figures.get(names.HOOK)}
        shares |= {name: seconds for name, seconds in measured_host.items() if seconds is not None}
    if is_cpu:
        cluster = dataclasses.replace(cluster, process_gb=figures[names.PROCESS] / 1e9, allocator_excess=1.0)
    for group in _LINKS:
        if own := [each for each in collectives if each.group == group]:
            cluster = _with_link(cluster, shares, own, machine)
    limited = {name: min(max(share, LIMITS[name][0]), LIMITS[name][1]) for name, share in shares.items()}
    return dataclasses.replace(cluster, efficiencies=limited)


def _with_link(
    cluster: Cluster, shares: dict[str, float], collectives: Sequence[MeasuredCollective], machine: Machine
) -> Cluster:
    """The cluster with the bandwidth of measured collectives; adds their efficiency and latency to `shares`.

    Fits the line seconds / fixed = latency + bytes / (bandwidth · fixed); fixed: the machine's time without bytes.
    """
    group, nodes = collectives[0].group, 1 if collectives[0].group == names.NODE else 2
    sizes, times = [], []
    for own in collectives:
        axis, hops = AxisPlacement(ranks=own.ranks, in_node=own.ranks, nodes=nodes), own.trips * (own.ranks - 1)
        fixed = machine.collective_seconds(axis, 0.0, hops=hops)
        sizes.append(own.trips * own.size * (own.ranks - 1) / own.ranks / fixed)
        times.append(own.seconds / fixed)
    constant, slope = fit_sum([[1.0] * len(sizes), sizes], times)
    shares["latency"] = max(shares.get("latency", 0.0), constant)
    if slope * max(sizes) <= _LEAST_GROWTH * constant:
        return cluster
    nominal = (machine.link_bytes_per_second if nodes == 1 else machine.network_bytes_per_second) / 1e9
    reached = 1 / slope / 1e9
    if nodes > 1:
        # A ring that leaves a node uses the adapters of all its ranks on that node.
        reached /= max(1, min(collectives[0].ranks, machine.per_node))
    shares[_LINKS[group]] = reached / max(nominal, reached)
    if nodes == 1:
        return dataclasses.replace(cluster, link_gb_per_second=max(nominal, reached))
    return dataclasses.replace(cluster, network_gb_per_second=max(nominal, reached))


def doubts(row: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """A warning for each link whose collectives were measured, but gave no bandwidth for the cluster."""
    groups = {each.group for each in _figures(row)[1]}
    return [
        f"no bandwidth of the {name}: the times of its collectives do not grow with their sizes; measure again "
        "while nothing else runs, or with larger ones: profiler.megabytes=64"
        for group, name in _LINKS.items()
        if group in groups and name not in cluster.efficiencies
    ]


def rate_lines(row: Mapping[str, Any]) -> list[str]:
    """Lines of text that show the measured figures.

    Raises:
        ConfigError: a figure is missing or not positive.
    """
    figures, collectives = _figures(row)
    text = []
    for name, value in figures.items():
        unit = next((unit for start, unit in _UNITS.items() if name.startswith(start)), None)
        if unit is not None:
            label = name.removeprefix("rates/").partition("(")[0]
            text.append(f"{label:26} {value / unit[0]:9,.{unit[2]}f} {unit[1]}")
    if not collectives:
        return [*text, "one process: no collective was measured"]
    for group, ranks in dict.fromkeys((each.group, each.ranks) for each in collectives):
        own = [each for each in collectives if (each.group, each.ranks) == (group, ranks)]
        kinds = list(dict.fromkeys(each.kind for each in own))
        where = "of a node" if group == names.NODE else "of several nodes"
        text += ["", f"µs, {ranks} ranks {where:13}" + "".join(f"{kind:>12}" for kind in kinds)]
        for size in dict.fromkeys(each.size for each in own):
            times = {each.kind: each.seconds for each in own if each.size == size}
            cells = "".join(f"{times[kind] * 1e6:12,.0f}" if kind in times else " " * 12 for kind in kinds)
            text.append(f"{size / 1024:20,.0f} KiB  {cells}")
    return text


def _figures(row: Mapping[str, Any]) -> tuple[dict[str, float], list[MeasuredCollective]]:
    """The measured figures of a row by name, and the collectives among them.

    Raises:
        ConfigError: a figure is missing or not positive.
    """
    figures = {name: value for name, value in row.items() if name.startswith("rates/")}
    for name in (names.PRODUCT, names.ATTENTION, names.COPY, names.POINTWISE, names.LAUNCH):
        if not any(known.startswith(name) for known in figures):
            raise ConfigError(KEY, name, "is missing in the measurement", "measure again")
    collectives = []
    for name, value in figures.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(KEY, value, f"is not a figure of {name}", "measure again")
        if name.startswith(names.COLLECTIVE):
            try:
                group, ranks, kind, size = name.removeprefix(names.COLLECTIVE).split()
                collectives.append(MeasuredCollective(group, int(ranks), kind, int(size), value))
            except ValueError:
                raise ConfigError(KEY, name, "is not the name of a collective", "measure again") from None
    return figures, collectives


# For CPUs the fit begins with rates this many times as large: caches are faster than memory, and shares are at most 1.
_WIDER = 5.0
# Least fitted memory value of a cluster, because a cluster's values must be positive.
_LEAST = 1e-3
# A calibration with fewer runs has too few measurements for the number of fitted parameters.
LEAST_RUNS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured run: the median time of its steps, and the memory of its fullest rank (None: not measured)."""

    name: str
    recipe: Recipe
    step_seconds: float
    memory_bytes: float | None = None

    @property
    def family(self) -> str:
        """The axes with a degree above 1, such as `shard·tensor`; or `one process`."""
        degrees = self.recipe.layout.degrees()
        return "·".join(axis for axis in AXES if degrees[axis] > 1) or "one process"


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Median absolute errors of the estimates for some runs, as shares of the measured values; nan: none measured."""

    runs: int
    time: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The runs' cluster with fitted values, and the errors before and after the fit by family; `all` has all runs."""

    cluster: Cluster
    before: Mapping[str, Errors]
    after: Mapping[str, Errors]


def calibrate(runs: Sequence[Measured]) -> Calibration:
    """Fit the values of a cluster to runs measured on it; the fit starts at the cluster's own values.

    Raises:
        ConfigError: there are too few runs, a measured time is not positive, or the runs have several clusters.
    """
    if len(runs) < LEAST_RUNS:
        rule = f"a calibration needs at least {LEAST_RUNS} measured runs"
        raise ConfigError(_RUNS, f"{len(runs)} runs", rule, "submit a sweep with more points")
    for run in runs:
        for value, what in ((run.step_seconds, "time of a step"), (run.memory_bytes, "memory")):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(_RUNS, value, f"is not a possible {what} of {run.name}", "leave the run out")
    first, *others = {repr(run.recipe.cluster): run for run in runs}.values()
    if others:
        rule = f"{first.name} and {others[0].name} have different clusters, and a calibration is of one"
        raise ConfigError(_RUNS, f"{1 + len(others)} clusters", rule, "choose the runs of one cluster")
    original = runs[0].recipe.cluster
    calibrated = _with_memory(runs, _with_times(runs, original))
    return Calibration(cluster=calibrated, before=_by_family(runs, original), after=_by_family(runs, calibrated))


def time_errors(runs: Sequence[Measured], cluster: Cluster) -> list[float]:
    """For each run, log(step time estimated with this cluster / measured step time)."""
    return _errors(runs, _machine(runs, cluster)) if runs else []


def memory_errors(runs: Sequence[Measured], cluster: Cluster) -> list[float]:
    """For each run, the error of the estimated memory as a share of the measured memory; nan: not measured."""
    machine = _machine(runs, cluster) if runs else None
    errors = []
    for run in runs:
        assert machine is not None
        reserved = reserved_bytes(run.recipe, machine, most_memory(run.recipe))
        errors.append(reserved / run.memory_bytes - 1 if run.memory_bytes is not None else math.nan)
    return errors


def _by_family(runs: Sequence[Measured], cluster: Cluster) -> dict[str, Errors]:
    times = [abs(math.expm1(error)) for error in time_errors(runs, cluster)]
    memories = [abs(error) for error in memory_errors(runs, cluster)]
    errors = {}
    for family in ("all", *sorted({run.family for run in runs})):
        own = [place for place, run in enumerate(runs) if family in ("all", run.family)]
        known = [memories[place] for place in own if not math.isnan(memories[place])] or [math.nan]
        time = statistics.median(times[place] for place in own)
        errors[family] = Errors(runs=len(own), time=time, memory=statistics.median(known))
    return errors


def _machine(runs: Sequence[Measured], cluster: Cluster) -> Machine:
    return machine_of(dataclasses.replace(runs[0].recipe, cluster=cluster))


def _errors(runs: Sequence[Measured], machine: Machine) -> list[float]:
    times = (step_time(run.recipe, machine, pipeline=simulated_time).seconds for run in runs)
    return [math.log(seconds / run.step_seconds) for seconds, run in zip(times, runs, strict=True)]


def _with_times(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """The cluster with efficiencies that are fitted to the times of its runs; for CPUs also with fitted rates."""
    machine, is_cpu = _machine(runs, cluster), cluster.accelerator == "cpu"
    if is_cpu:
        # Multiply the rates and divide the efficiencies by the same factor, down to the efficiencies' limits.
        shares = dataclasses.asdict(machine.efficiencies)
        for name in ("eager_memory", "fused_memory", "link"):
            shares[name] = max(LIMITS[name][0], shares[name] / _WIDER)
        cluster = dataclasses.replace(
            cluster,
            memory_gb_per_second=_WIDER * machine.memory_bytes_per_second / 1e9,
            link_gb_per_second=_WIDER * machine.link_bytes_per_second / 1e9,
            efficiencies=shares,
        )
        machine = _machine(runs, cluster)

    def errors(values: Efficiencies) -> list[float]:
        return _errors(runs, dataclasses.replace(machine, efficiencies=values))

    names = [name for name in LIMITS if not (is_cpu and name in HOST)]
    shares = dataclasses.asdict(fit(errors, machine.efficiencies, names))
    if not is_cpu:
        return dataclasses.replace(cluster, efficiencies=shares)
    assert cluster.memory_gb_per_second is not None
    assert cluster.link_gb_per_second is not None
    memory = max(shares["eager_memory"], shares["fused_memory"])
    reached = {name: shares[name] / memory for name in ("eager_memory", "fused_memory")}
    return dataclasses.replace(
        cluster,
        memory_gb_per_second=cluster.memory_gb_per_second * memory,
        link_gb_per_second=cluster.link_gb_per_second * shares["link"],
        efficiencies={**shares, **reached, "link": 1.0},
    )


def _with_memory(runs: Sequence[Measured], cluster: Cluster) -> Cluster:
    """The cluster with a fitted `allocator_excess`; on CPUs also with fitted `process_gb` and `message_excess`."""
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
    """Content of a file of the group `cluster`; the comment is a line that says how the values were found."""

    def rounded(value: Any) -> Any:
        # A measurement has no more than six exact digits.
        if isinstance(value, dict):
            return {name: rounded(inner) for name, inner in value.items()}
        return float(f"{value:.6g}") if isinstance(value, float) else value

    values = {name: rounded(value) for name, value in plain(cluster).items() if value not in (None, {})}
    return f"defaults: [schema, _self_]\n# {comment}\n{config_text(literal(values))}"


# Larger errors than 5 % count by their size and not by their square (Huber 1964): so a single run that the model cannot
# explain does not decide the fit.
_HUBER = 0.05
# Weight of a parameter's distance from its start value: a parameter that no run depends on stays there. A distance of 1
# in a parameter's coordinate (about a factor of 2.7) counts as an error of 2 % in one run.
_PRIOR = 0.02
# The same weight for the factors of `fit_sum`.
_HELD = 1e-3
_ITERATIONS = 40
_SMALL = 1e-4
# Parameters whose limits are orders of magnitude apart: the fit uses the logarithm of the value as coordinate.
_LOGARITHMIC = ("launch_seconds", "latency", *HOST)
_FLOOR = 1e-8  # least seconds: zero has no logarithm


def fit(errors: Callable[[Efficiencies], Sequence[float]], start: Efficiencies, names: Sequence[str]) -> Efficiencies:
    """The efficiencies with the smallest errors, by least squares.

    Args:
        errors: gives log(estimated / measured) for each run.
        start: start values of the parameters in `names`; the other parameters keep their values.
    """
    # Imported here: the import takes 0.2 s.
    from scipy.optimize import least_squares

    origin = np.array([_coordinate(name, getattr(start, name)) for name in names])

    def values(at: np.ndarray) -> Efficiencies:
        changed = {name: _value(name, float(coordinate)) for name, coordinate in zip(names, at, strict=True)}
        return dataclasses.replace(start, **changed)

    def residuals(at: np.ndarray) -> np.ndarray:
        raw = np.asarray(errors(values(at)), dtype=float)
        # Pseudo-Huber: above _HUBER the square of this value grows linearly with the error.
        robust = np.sign(raw) * _HUBER * np.sqrt(2 * (np.sqrt(1 + (raw / _HUBER) ** 2) - 1))
        return np.concatenate([robust, _PRIOR * (at - origin)])

    return values(least_squares(residuals, origin, ftol=_SMALL, max_nfev=_ITERATIONS).x)


def fit_sum(
    terms: Sequence[Sequence[float]], measured: Sequence[float], start: Sequence[float] | None = None
) -> list[float]:
    """The non-negative factors with which the sum of factor · term has the smallest sum of absolute relative errors.

    The method is iteratively reweighted least squares.

    Args:
        terms: for each term, its value in each measurement.
        measured: the positive result of each measurement.
        start: a factor that the measurements do not determine keeps this value; None: zero.
    """
    from scipy.optimize import nnls

    y = np.asarray(measured, dtype=float)
    shares = np.asarray(terms, dtype=float).T / y[:, None]
    solution = np.zeros(len(terms)) if start is None else np.array(start, dtype=float)
    # Terms have different units: scale each by its largest share. A term that is always 0 keeps its factor.
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


def _coordinate(name: str, value: float) -> float:
    """The unlimited number (coordinate) that stands for a value inside its limits in a fit; `_value` is the inverse."""
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

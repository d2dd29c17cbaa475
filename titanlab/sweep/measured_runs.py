"""Reads the runs of a sweep from which a cluster is calibrated, and says why others are left out."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from titanlab.costs import meter
from titanlab.errors import ConfigError, TitanlabError
from titanlab.plan import Measured
from titanlab.ranges import plain
from titanlab.recipe import Cluster, frozen_recipe
from titanlab.records import OutcomeKind, RunFolder, canonical, canonical_json
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system import sweep_argument

KEY = "--calibrate"
_RESIDENT = "memory/max_resident(GiB)"
# The largest share of a step, in percent, that a run may wait for data: the planner does not estimate this time.
_MOST_WAITING = 5
# Values of a cluster that come from a calibration or a measurement: unlike facts, they may differ between runs.
_FITTED = ("efficiencies", "memory_gb_per_second", "allocator_excess", "message_excess", "process_gb", "device")
_FITTED_ON_CPUS = ("peak_tflops", "link_gb_per_second", "memory_gb")
# States of runs that have not begun.
_WAITING = ("prepared", "queued", "missing")


class LeftOut(NamedTuple):
    """A run that cannot be used to calibrate its machine, and why."""

    run: str
    reason: str


class MeasuredSweep(NamedTuple):
    """The runs of a sweep that a calibration uses.

    Attributes:
        rows: one for each recipe: medians over the recipe's repeats, with the name of the first repeat.
        runs: number of runs, repeats included.
        machine: name of the device; for CPUs the model, and the threads of each process.
        stale: number of runs whose code differs from the present code.
    """

    rows: Sequence[Measured]
    runs: int
    left_out: Sequence[LeftOut]
    machine: str
    stale: int


class _Run(NamedTuple):
    """A measured run, with the values that all runs of a calibration must have in common."""

    measured: Measured
    common: dict[str, str]
    peak_tflops: float | None
    host: Mapping[str, Any]
    stale: bool


def measured_sweep(sweep: SweepFolder, table: Sequence[Mapping[str, Any]]) -> MeasuredSweep:
    """The runs of a sweep from which a cluster is calibrated; other runs are left out with a reason.

    Raises:
        ConfigError: no run was measured, or two kinds of machine have equally many runs.
    """
    # Points that were dropped have no run.
    found = {row["run"]: _read(sweep.run(row["run"]), row) for row in table if row["run"] is not None}
    runs = [run for run in found.values() if isinstance(run, _Run)]
    left_out = [LeftOut(name, reason) for name, reason in found.items() if isinstance(reason, str)]
    if not runs:
        reasons = Counter(dropped.reason for dropped in left_out)
        why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3)) or "it has no runs"
        rule = f"has no run that was measured to its end: {why}"
        cure = f"wait for it (titanlab status {sweep_argument(sweep.path)}), or submit it again"
        raise ConfigError(KEY, sweep.name, rule, cure)
    for name in runs[0].common:
        usual = _usual(runs, name)
        for run in runs:
            if (value := run.common[name]) != usual:
                reason = f"ran on {name} {value}, and most on {usual}"
                if name == "cluster":
                    reason = "has other values of its cluster than most"
                left_out.append(LeftOut(run.measured.name, reason))
        runs = [run for run in runs if run.common[name] == usual]
    machine, stale = runs[0].common["machine"].removeprefix("cuda "), sum(run.stale for run in runs)
    return MeasuredSweep(_pooled(runs), len(runs), sorted(left_out), machine, stale)


def _read(run: RunFolder, row: Mapping[str, Any]) -> _Run | str:
    """The measurement of a run, or why it cannot be used."""
    seconds, waiting = row["step_seconds"], row["data_percent"]
    reasons = {
        f"cannot be read: {row['cause']}": row["state"] == "unreadable",
        "has not begun": row["state"] in _WAITING,
        "is still running": row["state"] != "ended",
        f"ended as {row['outcome']}": row["outcome"] != OutcomeKind.DONE.value,
        "had more processes than cores": bool(row["oversubscribed"]),
        "has no step after the warm-up": not row["measured_steps"],
        f"has no time of a step: {seconds}": not _is_positive(seconds),
        f"waited for data in more than {_MOST_WAITING} % of its steps' time": (
            _is_positive(waiting) and waiting > _MOST_WAITING
        ),
    }
    if (reason := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        return reason
    try:
        recipe = frozen_recipe(run, attempt=row["attempt"] or None)
        outcome = run.result()
        env = run.env(row["attempt"] or None) or {}
    except TitanlabError as error:
        return f"cannot be read: {error}"
    metrics = {} if outcome is None else outcome.metrics
    memory = metrics.get(meter.MEMORY_MOST, metrics.get(meter.MEMORY_RESERVED, metrics.get(_RESIDENT)))
    bytes_held = memory * 2**30 if _is_positive(memory) else None
    cluster, host, fitted = recipe.cluster, env.get("host") or {}, list(_FITTED)
    machine, peak = f"{cluster.accelerator} {cluster.device}", None
    if cluster.accelerator == "cpu":
        fitted += _FITTED_ON_CPUS
        threads = str(env.get("threads") or "an unknown number of")
        machine = f"{host.get('cpu') or 'cpu'}, {threads} {'thread' if threads == '1' else 'threads'} a process"
        peak = metrics.get("peak_tflops")
    common = {
        "machine": machine,
        "cluster": repr({name: value for name, value in plain(cluster).items() if name not in fitted}),
        "titanlab": str((env.get("code") or {}).get("version")),
        "torch": str((env.get("packages") or {}).get("torch")),
    }
    measured = Measured(name=row["run"], recipe=recipe, step_seconds=float(seconds), memory_bytes=bytes_held)
    return _Run(measured, common, peak if _is_positive(peak) else None, host, bool(row["stale"]))


def with_host(cluster: Cluster, host: Mapping[str, Any]) -> Cluster:
    """A cluster of CPUs with missing values set: one process per core of the host, and equal shares of its memory."""
    memory, cores = host.get("memory_gib"), host.get("usable_cores")
    if cluster.per_node is None and isinstance(cores, int) and cores > 0:
        cluster = dataclasses.replace(cluster, per_node=cores)
    if cluster.memory_gb is None and cluster.per_node is not None and _is_positive(memory):
        cluster = dataclasses.replace(cluster, memory_gb=float(memory) * 2**30 / 1e9 / cluster.per_node)  # type: ignore[arg-type]
    return cluster


def _usual(runs: Sequence[_Run], name: str) -> str:
    """The most frequent value of `name` among the values that all runs should have in common.

    Raises:
        ConfigError: two values are equally frequent.
    """
    (usual, most), *others = Counter(run.common[name] for run in runs).most_common()
    if others and others[0][1] == most:
        values = "two sets of values" if name == "cluster" else f"{usual} and half on {others[0][0]}"
        rule = f"has {most} runs each by {name}, half on {values}, and a calibration is of one"
        raise ConfigError(KEY, len(runs), rule, "submit a sweep for each of them")
    return usual


def _pooled(runs: Sequence[_Run]) -> list[Measured]:
    """A measurement for each recipe: medians over its repeats. All recipes get one cluster, with measured values."""
    cluster = Counter(run.measured.recipe.cluster for run in runs).most_common(1)[0][0]
    peaks = [run.peak_tflops for run in runs if run.peak_tflops is not None]
    if cluster.peak_tflops is None and peaks:
        # Take the fastest matrix product that any run measured: the other runs shared their cores.
        cluster = dataclasses.replace(cluster, peak_tflops=max(peaks))
    if cluster.accelerator == "cpu":
        cluster = with_host(cluster, runs[0].host)
    by_recipe: dict[str, list[_Run]] = {}
    for run in sorted(runs, key=lambda run: run.measured.recipe.repeat):
        same = dataclasses.replace(run.measured.recipe, repeat=0)
        by_recipe.setdefault(canonical_json(canonical(same)), []).append(run)
    return [
        dataclasses.replace(
            repeats[0].measured,
            recipe=dataclasses.replace(repeats[0].measured.recipe, cluster=cluster),
            step_seconds=statistics.median(run.measured.step_seconds for run in repeats),
            memory_bytes=statistics.median(memory) if memory else None,
        )
        for repeats in by_recipe.values()
        for memory in [[run.measured.memory_bytes for run in repeats if run.measured.memory_bytes is not None]]
    ]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

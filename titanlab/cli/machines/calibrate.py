"""`titanlab plan --calibrate SWEEP`: fit the planner to the user's own runs, and write a cluster file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.machines.cluster_out import CALIBRATED, check_out, write_cluster
from titanlab.plan.calibration import calibrate, lines
from titanlab.sweep.measured_runs import LeftOut, MeasuredSweep, measured_sweep
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import counted

# Runs that are named for each reason.
_NAMED = 3


def calibrate_sweep(name: str, *, runs: str, out: Path | None, console: Console) -> None:
    """Calibrate with a sweep, print the errors before and after, and write the cluster file.

    Args:
        out: of the file; None: `cluster/SWEEP.yaml` in the sweep's folder.

    Raises:
        ConfigError: there is no such sweep, too few of its runs can be used, or the file cannot be written there.
    """
    sweep = open_sweep(name, runs)
    path = user_path(out or sweep.path / "cluster" / f"{sweep.name}.yaml")
    check_out(path)
    measured = measured_sweep(sweep, look_at(sweep, console.warn)())
    calibration = calibrate(measured.rows)
    console.note("\n".join([*_title(sweep.name, measured), *_reasons(measured.left_out), "", *lines(calibration), ""]))
    after = calibration.after["all"]
    comment = f"{CALIBRATED} with {counted(after.runs, 'recipe')} of the sweep {sweep.name}, on {measured.machine}."
    console.note("\n".join(write_cluster(path, calibration.cluster, comment)))


def _title(name: str, measured: MeasuredSweep) -> list[str]:
    recipes = counted(len(measured.rows), "recipe")
    text = [f"{name}: {recipes} in {counted(measured.runs, 'run')} on {measured.machine}"]
    if measured.stale:
        text.append(f"{measured.stale} of them made by other code than is here now")
    return text


def _reasons(left_out: Sequence[LeftOut]) -> list[str]:
    """One line for each reason, with the first runs that it holds for."""
    counts = Counter(dropped.reason for dropped in left_out)
    text = []
    for reason, count in counts.most_common():
        of_reason = [dropped.run for dropped in left_out if dropped.reason == reason]
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        text.append(f"left out {count}: {reason} ({', '.join(of_reason[:_NAMED])}{more})")
    return text

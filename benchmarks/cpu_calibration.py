"""How near the planner is on CPUs that it was calibrated for: half of a sweep calibrates, the other half is checked.

    titanlab sweep +sweeps=cpu_calibration --wait           about ten minutes on two cores with no other work
    python benchmarks/cpu_calibration.py                    the errors of every row
    python benchmarks/cpu_calibration.py --write            and keeps them in benchmarks/results/cpu_calibration.json

A row is a recipe with its repeats, whose medians count. Rows whose hash is odd calibrate, rows whose hash is even are
checked; the hash is that of the first repeat's folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.plan import Measured, calibrate
from titanlab.plan.calibration import Calibration, memory_errors, time_errors
from titanlab.records.run_folder import FOLDER_NAME
from titanlab.sweep import look_at, measured_sweep, open_sweep
from titanlab.sweep.measured_runs import MeasuredSweep

RESULT = Path(__file__).parent / "results" / "cpu_calibration.json"
# Largest median errors of the rows that are checked.
BARS = {"time": 0.15, "memory": 0.05}


def is_even(row: Measured) -> bool:
    """Whether the hash of a row's first repeat is even.

    Raises:
        ValueError: its folder was renamed.
    """
    match = FOLDER_NAME.fullmatch(row.name)
    if match is None:
        raise ValueError(f"{row.name}: has no hash at its end")
    return int(match["hash8"], 16) % 2 == 0


def study(found: MeasuredSweep) -> dict[str, Any]:
    """Calibrate with the odd rows, and estimate all of them.

    Raises:
        ConfigError: there are too few odd rows.
    """
    odd = [row for row in found.rows if not is_even(row)]
    even = [row for row in found.rows if is_even(row)]
    calibration = calibrate(odd)
    given = found.rows[0].recipe.cluster
    rows = [*figures(odd, calibration, half="calibrates"), *figures(even, calibration, half="checked")]
    return {
        "rows_calibrating": len(odd),
        "rows_checked": len(even),
        "runs": found.runs,
        "left_out": len(found.left_out),
        "bars": BARS,
        "median_error_before": medians(even, given),
        "median_error_after": medians(even, calibration.cluster),
        "median_error_of_calibrating_rows": medians(odd, calibration.cluster),
        "by_family": families(even, calibration),
        "cluster": {
            name: value for name, value in dataclasses.asdict(calibration.cluster).items() if value is not None
        },
        "rows": rows,
    }


def medians(rows: Sequence[Measured], cluster: Any) -> dict[str, float]:
    """Median absolute errors of rows on a cluster."""
    times = [abs(math.expm1(error)) for error in time_errors(rows, cluster)]
    memories = [abs(error) for error in memory_errors(rows, cluster) if not math.isnan(error)]
    return {"time": round(statistics.median(times), 4), "memory": round(statistics.median(memories), 4)}


def families(rows: Sequence[Measured], calibration: Calibration) -> dict[str, Any]:
    """Number of rows and median errors by family of layouts."""
    names = sorted({row.family for row in rows})
    own = {name: [row for row in rows if row.family == name] for name in names}
    return {name: {"rows": len(own[name]), **medians(own[name], calibration.cluster)} for name in names}


def figures(rows: Sequence[Measured], calibration: Calibration, *, half: str) -> list[dict[str, Any]]:
    """What was measured and estimated, by row."""
    times, memories = time_errors(rows, calibration.cluster), memory_errors(rows, calibration.cluster)
    return [
        {
            "row": row.name,
            "half": half,
            "seconds": round(row.step_seconds, 4),
            "time_error": round(math.expm1(time), 4),
            "megabytes": None if row.memory_bytes is None else round(row.memory_bytes / 1e6, 1),
            "memory_error": None if math.isnan(memory) else round(memory, 4),
        }
        for row, time, memory in zip(rows, times, memories, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default="cpu_calibration")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    sweep = open_sweep(given.sweep, given.runs)
    found = measured_sweep(sweep, look_at(sweep, print)())
    for left_out in found.left_out:
        print(f"left out {left_out.run}: {left_out.reason}")
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{found.machine}, {os.cpu_count()} cores, {platform.machine()}",
        **study(found),
    }
    for row in result["rows"]:
        print(
            f"{row['half']:10} {row['row']:66} {row['seconds']:7.3f} s {row['time_error']:+7.1%}"
            f"  {row['megabytes']:7.1f} MB {row['memory_error']:+7.1%}"
        )
    for family, errors in result["by_family"].items():
        print(
            f"checked {family:14} {errors['rows']:3} rows  time {errors['time']:6.1%}  memory {errors['memory']:6.1%}"
        )
    before, after = result["median_error_before"], result["median_error_after"]
    for kind, bar in BARS.items():
        word = "met" if after[kind] <= bar else "MISSED"
        errors = f"median {after[kind]:.1%}, {before[kind]:.1%} before"
        print(f"{kind}: {errors}, of {result['rows_checked']} rows; the bar of {bar:.0%} is {word}")
    if given.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {RESULT}")


if __name__ == "__main__":
    main()

"""`titanlab collect SWEEP`: write the sweep's table as parquet and CSV, and compare its recipes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments
from titanlab.sweep.comparison import comparison
from titanlab.sweep.listing import dropped, failures, gaps, runs
from titanlab.sweep.ranking import drift_lines
from titanlab.sweep.rows import look_at, write_table
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import counted


def main(arguments: Sequence[str]) -> int:
    """Write the table, print where it is, and compare the recipes."""
    parser = Arguments("collect", "Write a sweep's table as parquet and CSV: a row for each run and dropped point.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument("--into", type=Path, help="the folder for the files (default: the sweep's own)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    sweep = open_sweep(args.sweep, args.runs)
    rows = look_at(sweep, Console().warn, estimates=True)()
    files = write_table(rows, sweep.name, user_path(args.into or sweep.path))
    lines = [f"{sweep.name}: {counted(len(runs(rows)), 'run')}"]
    lines += [f"  {line}" for line in comparison(rows)]
    lines += [f"  {line}" for line in drift_lines(rows)]
    lines += [f"  {line}" for line in failures(rows)]
    lines += [f"  {line}" for line in gaps(rows)]
    lines += [f"  {line}" for line in dropped(rows)]
    lines += [f"table: {os.path.relpath(path)}" for path in files]
    with Console() as console:
        console.note("\n".join(lines))
    return 0

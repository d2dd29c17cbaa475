"""`titanlab status [SWEEP [RUN]]`: show the state of a sweep's runs, and the causes of failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.listing import details, failure_text, overview
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.sweep.watch import Screen
from titanlab.system.files import finite
from titanlab.system.terminal import Console


def main(arguments: Sequence[str]) -> int:
    """Show all sweeps, one sweep, or one run of a sweep."""
    parser = Arguments("status", "Show where the runs of a sweep stand; without a sweep, which there are.")
    parser.add_argument("sweep", nargs="?", help="the sweep's name, or its folder")
    parser.add_argument("run", nargs="?", help="one run of it: its folder, name, or the first digits of its hash")
    parser.add_argument("--watch", action="store_true", help="go on showing it until nothing runs or waits any more")
    parser.add_argument("--json", action="store_true", help="rows as JSON; docs/comparing.md has the columns")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.watch and (args.json or args.sweep is None or args.run is not None):
        raise ConfigError("--watch", True, "is for the table of one sweep", "give a sweep, and nothing else")
    if args.sweep is None:
        sweeps = overview(args.runs)
        if args.json:
            _print_json(sweeps.rows)
        else:
            with Console() as console:
                console.note("\n".join(sweeps.lines()))
        return 0
    sweep = open_sweep(args.sweep, args.runs)
    look = look_at(sweep, Console().warn)
    if args.run is not None:
        return _show_runs(sweep.find([args.run]), look(), as_json=args.json)
    if args.json:
        _print_json(look())
    elif args.watch:
        Screen().follow(sweep.name, look)
    else:
        Screen().show(sweep.name, look())
    return 0


def _show_runs(named: Sequence[RunFolder], rows: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    """Show the runs that the user named: one run, or several repeats with one label."""
    by_folder = {row["run"]: row for row in rows}
    for run in named:
        if by_folder[run.path.name]["state"] == "unreadable":
            # Raises the ConfigError that names the damaged file, if a file is damaged.
            run.check_files()
    if as_json:
        chosen = [(run, by_folder[run.path.name]) for run in named]
        _print_json([{**row, "traceback": (failure_text(run, row) or ("", None))[1]} for run, row in chosen])
        return 0
    with Console() as console:
        for run in named:
            row = by_folder[run.path.name]
            console.start(run.path.name, details(row))
            words = failure_text(run, row)
            if words is not None:
                source, text = words
                console.note(f"{source}:\n{text}")
    return 0


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    with Console() as console:
        console.note(json.dumps(finite(rows), indent=2, ensure_ascii=False))

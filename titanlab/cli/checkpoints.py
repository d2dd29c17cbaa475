"""`titanlab checkpoints RUN`: list a run's checkpoints, and verify their bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from titanlab.checkpoint.listing import ListedCheckpoint, list_checkpoints
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.cli.arguments import Arguments
from titanlab.records.run_search import find_run
from titanlab.sweep.listing import aligned
from titanlab.system.terminal import Console
from titanlab.system.text import data_size, duration, shown_path

_HEADINGS = ("step", "size", "saved", "format", "state", "")


def main(arguments: Sequence[str]) -> int:
    """Print a line for each checkpoint. Returns 1 if one that counts was found damaged."""
    parser = Arguments("checkpoints", "List a run's checkpoints, by step.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash")
    parser.add_argument("--verify", action="store_true", help="read every byte, and exit with 1 if one is damaged")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    run = find_run(args.run, args.runs)
    rows = list_checkpoints(checkpoints_of(run), verifies=args.verify)
    with Console() as console:
        if args.json:
            console.note(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        elif not rows:
            console.note(f"{shown_path(run.path)} has no checkpoints")
        else:
            now = time.time()
            console.note("\n".join(aligned(_HEADINGS, [_cells(row, now) for row in rows], right=_HEADINGS[:3])))
    return 1 if any(row.problem is not None for row in rows) else 0


def _cells(row: ListedCheckpoint, now: float) -> list[str]:
    state = f"{row.state}, verified" if row.verified else row.state
    if row.state == "complete" and row.format == "dcp":
        state = "complete, without checksums"
    age = f"{duration(max(now - row.saved, 0.0))} ago"
    return [
        str(row.step),
        data_size(row.bytes),
        age,
        row.format,
        state,
        (row.problem or "").removeprefix("is damaged: "),
    ]

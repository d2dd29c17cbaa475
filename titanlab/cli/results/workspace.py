"""`titanlab workspace SWEEP`: save a wandb workspace and report of a sweep, or print them as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.report import wandb_workspace
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import SweepFolder, open_sweep, readable
from titanlab.system.terminal import Console
from titanlab.tracker import wandb_upload
from titanlab.tracker.wandb_mode import has_key
from titanlab.tracker.wandb_schema import Wandb
from titanlab.train.tracked_run import has_tracker


def main(arguments: Sequence[str]) -> int:
    """Save both and print their addresses; without a key, or with --json, print them."""
    parser = Arguments("workspace", "Make a wandb workspace and a wandb report of a sweep's runs.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument("--project", help="wandb's project (default: that of the runs)")
    parser.add_argument("--entity", help="user or team (default: that of the runs, or of the account)")
    parser.add_argument(
        "--json", action="store_true", help="print them, as wandb's server takes them, and save nothing"
    )
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    sweep = open_sweep(args.sweep, args.runs)
    wandb_workspace.check_installed()
    with Console() as console:
        rows = look_at(sweep, console.warn)()
        tracker = _wandb_config(sweep, console)
        if not tracker and not any(has_tracker(run, Wandb.kind) for run in sweep.runs()):
            console.warn(
                f"wandb has no run of {sweep.name}; titanlab sync --tracker wandb {sweep.name} writes its files from "
                "metrics.jsonl"
            )
        view = wandb_workspace.view_of(sweep.name, rows, tracker=tracker, project=args.project, entity=args.entity)
        if args.json or not has_key(os.environ):
            if not args.json:
                console.warn(
                    "no API key of wandb was found, so nothing is saved; WANDB_API_KEY or `wandb login` has one"
                )
            sys.stdout.write(wandb_workspace.json_text(view) + "\n")
            return 0
        if (lack := wandb_upload.lack()) is not None:
            raise lack
        for address in wandb_workspace.save(view):
            console.note(address)
    return 0


def _wandb_config(sweep: SweepFolder, console: Console) -> Mapping[str, Any]:
    """The config of wandb in one of the sweep's runs; empty if none has it."""
    for run in readable(sweep.runs(), console.warn, named=False):
        try:
            tracker = run.section("tracker")
        except ConfigError as error:
            console.warn(f"{run.path.name} is left alone: {error}")
            continue
        # Of several trackers, each has a key of its own.
        for config in (tracker, *(value for value in tracker.values() if isinstance(value, Mapping))):
            if config.get("kind") == Wandb.kind:
                return config
    return {}
